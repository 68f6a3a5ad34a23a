"""Evolution strategies (EGGROLL): the whole population in one forward, learning from any reward.

eggroll      ask for members' outputs, tell their rewards: the algorithm, for any module
population   which weights evolve, and the noise of the members
fitness      rewards to the fitness of each member
update       from fitness to a step of the weights: directions, fp32 masters, int8 votes
rewards      what a completion is worth, and the processes that compute it
tasks        prompts, the facts to check completions by, and their rewards
training     a run of `flatout evolve`: epochs, evaluations, checkpoints, log
settings     the settings of a run
report       the picture and the page of a run
verify       every optimisation compared with its plain form
"""
