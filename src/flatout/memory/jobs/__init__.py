"""From the user's objects to a `Job`, and how a job is stepped.

job               `Job` (how to make its parts) and `Recipe` (how it is stepped)
step              one training step, the same with and without data
example_batch     batches of any size from one example, or from a batch maker
batch_without_data  one batch, of whose large tensors only the shapes are made
held_tensors      every tensor that a module or a container holds, with its place
from_objects      a model or a step function that exists already
from_name         `pkg.module:build`, a config folder or a LightningModule, by name
from_huggingface  a folder with a config.json
from_lightning    a LightningModule
optimizer_copies  existing optimizers over the parameters of a copied model
eight_bit_adam    bitsandbytes' Adam by its arithmetic
"""
