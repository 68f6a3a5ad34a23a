"""A model folder in, the trained model out, for every way a family keeps its weights."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from flatout.engines.evolution.eggroll import Eggroll
from flatout.engines.evolution.tasks.task import Prompt
from flatout.engines.evolution.training.models import (
    Texts,
    open_model,
    open_tokenizer,
    save_model,
)
from flatout.engines.run.models import DType
from flatout.ground.errors import BadInput
from flatout.multiplex.decode.generator import generate
from flatout.multiplex.models.families import read_decoder
from tests.support.evolution import save_tiny, tiny_llama

CPU = torch.device("cpu")


def tiny(kind: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=16, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        ).eval()
    if kind == "neox":
        config = GPTNeoXConfig(
            vocab_size=16,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
        )
        return GPTNeoXForCausalLM(config).eval()
    return tiny_llama(layers=2)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox"])
def test_what_evolved_is_what_is_saved(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    decoder = read_decoder(model)
    prompts = [[1, 2, 3], [9, 8]]
    before = generate(decoder, prompts, max_new_tokens=8)
    for number, product in enumerate(decoder.projections().values()):
        product.weight.add_(
            torch.randn(product.weight.shape, generator=torch.Generator().manual_seed(number))
        )
    after = generate(decoder, prompts, max_new_tokens=8)
    assert after != before
    save_model(model, None, tmp_path / "model")
    loaded = open_model(tmp_path / "model", device=CPU, dtype="float32")
    assert generate(loaded, prompts, max_new_tokens=8) == after
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_model_is_saved_in_its_dtype_and_a_tied_head_once(kind: str, dtype: DType, tmp_path: Path) -> None:
    """What is saved are the rounded weights that the run evaluates, not the fp32 masters."""
    from transformers import AutoModelForCausalLM

    tiny(kind).to(torch.bfloat16).save_pretrained(tmp_path / "given")
    model: Any = open_model(tmp_path / "given", device=CPU, dtype=dtype)
    ids = torch.tensor([[1, 2, 3, 9]])
    untrained = model(ids).logits
    es = Eggroll(model, population=8, sigma=0.1, lr=1.0)
    es.tell(torch.arange(8.0)[:, None])
    trained = model(ids).logits
    assert not trained.equal(untrained)
    save_model(model, None, tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {getattr(torch, dtype)}
    given = load_file(tmp_path / "given" / "model.safetensors")
    assert saved.keys() == given.keys()
    assert bool({"lm_head.weight", "embed_out.weight"} & saved.keys()) == (kind == "neox")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded(ids).logits.equal(trained)


def test_a_full_disk_is_no_defect_and_leaves_the_model_before(tmp_path: Path) -> None:
    model, folder = tiny("llama"), tmp_path / "model"
    save_model(model, None, folder)
    before = (folder / "model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(BadInput, match=r"File too large.*--resume writes it"):
            save_model(model, None, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_has_the_type_that_is_given_and_no_gradients(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    assert next(open_model(folder, device=CPU, dtype="float32").parameters()).dtype == torch.float32
    half = open_model(folder, device=CPU, dtype="bfloat16")
    assert next(half.parameters()).dtype == torch.bfloat16
    assert not any(parameter.requires_grad for parameter in half.parameters())


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no model folder at"):
        open_model(tmp_path / "absent", device=CPU, dtype="float32")
    with pytest.raises(BadInput, match=r"has no config\.json"):
        open_model(tmp_path, device=CPU, dtype="float32")
    for config in ("{", '{"model_type": "no-such-family"}', '{"model_type": "llama"}'):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(BadInput, match="no causal language model") as error:
            open_model(tmp_path, device=CPU, dtype="float32")
        assert "\n" not in str(error.value)


def test_only_a_task_of_texts_needs_a_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    assert open_tokenizer(folder, prompts=[Prompt(token_ids=(1,), answer={}, key="numbers")]) is None
    with pytest.raises(BadInput, match="has no tokenizer") as error:
        open_tokenizer(folder, prompts=[Prompt(text="one", answer={}, key="one")])
    assert "\n" not in str(error.value)


WORDS = ["<end>", "<unk>", "one", "two", "\n", "two\n", "user:"]
TEMPLATE = "{% for message in messages %}user: {{ message['content'] }}{% endfor %}"


def tokenizer(*, chat: bool = False) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    words.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>")
    if chat:
        made.chat_template = TEMPLATE
    return made


def asked(text: str) -> Prompt:
    return Prompt(text=text, answer={}, key=text)


NUMBERS = Prompt(token_ids=(4, 5), answer={}, key="numbers")


def test_a_task_of_numbers_needs_no_tokenizer(tmp_path: Path) -> None:
    assert open_tokenizer(tmp_path, prompts=[NUMBERS]) is None
    texts = Texts(None, stop=("\n",), ends=(7,))
    assert texts.ids([NUMBERS]) == [(4, 5)]
    assert texts.texts([(1, 2)]) == ["1 2"]
    assert texts.ends == (7,)


def test_text_is_encoded_and_read(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    texts = Texts(open_tokenizer(tmp_path, prompts=[asked("one")]))
    assert texts.ids([asked("one two")]) == [(2, 3)]
    assert texts.texts([(2, 3, 0)]) == ["onetwo"]
    assert texts.ends == (0,)


def test_any_token_that_holds_a_stop_ends_a_row_and_the_text_is_cut_there() -> None:
    texts = Texts(tokenizer(), stop=("\n",), ends=(1,))
    assert texts.ends == (0, 1, 4, 5)
    assert texts.texts([(2, 5)]) == ["onetwo"]
    assert texts.texts([(4, 2)]) == [""]


def test_a_chat_template_is_used_where_there_is_one() -> None:
    prompt = asked("two")
    assert Texts(tokenizer(chat=True)).ids([prompt]) == [(6, 3)]
    assert Texts(tokenizer(chat=True), chat=False).ids([prompt]) == [(3,)]
    assert Texts(tokenizer()).ids([prompt]) == [(3,)]
    with pytest.raises(BadInput, match="no chat template"):
        Texts(tokenizer(), chat=True)


def byte_level(*, clean: bool = False) -> Any:
    """Bytes as tokens, of which few are whole characters, behind a token that begins every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(["<begin>", "<end>", "user:", *alphabet])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<begin>",
        eos_token="<end>",
        chat_template="<begin>" + TEMPLATE,
        clean_up_tokenization_spaces=clean,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=clean,
    )


BYTE_LEVEL, CLEANING = byte_level(), byte_level(clean=True)


@given(
    texts=st.lists(st.text(max_size=12), max_size=5),
    rows=st.lists(st.lists(st.integers(0, 258), max_size=12).map(tuple), max_size=5),
    chat=st.booleans(),
    cleans=st.booleans(),
)
def test_a_batch_is_encoded_and_decoded_as_one_by_one(
    texts: list[str], rows: list[tuple[int, ...]], chat: bool, cleans: bool
) -> None:
    used = CLEANING if cleans else BYTE_LEVEL
    both = Texts(used, chat=chat)
    expected = []
    for text in texts:
        said = [{"role": "user", "content": text}]
        written = used.apply_chat_template(said, add_generation_prompt=True, tokenize=False) if chat else text
        expected.append(tuple(used.encode(written, add_special_tokens=not chat)))
    prompts = [asked(text) for text in texts]
    assert both.ids([NUMBERS, *prompts, NUMBERS]) == [(4, 5), *expected, (4, 5)]
    assert both.texts(rows) == [used.decode(row, skip_special_tokens=True) for row in rows]


def test_a_batch_is_one_call_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Counted:
        def __init__(self, own: Any) -> None:
            self._own = own

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._own, name)
            if not name.startswith(("encode", "decode")) or not callable(found):
                return found

            def counted(rows: Any, *arguments: Any, **options: Any) -> Any:
                calls.append((name, len(rows)))
                return found(rows, *arguments, **options)

            return counted

    used = byte_level()
    both = Texts(used, chat=False)
    monkeypatch.setattr(used, "_tokenizer", Counted(used._tokenizer))
    ids = both.ids([asked(f"text {number}") for number in range(100)])
    assert both.texts([tokens[1:] for tokens in ids]) == [f"text {number}" for number in range(100)]
    assert calls == [("encode_batch", 100), ("decode_batch", 100)]
