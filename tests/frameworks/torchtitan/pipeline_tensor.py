"""torchtitan's debug model of llama3: two pipeline ranks, each of two tensor parallel ones"""

# verdict: same bits
# worlds: 4
# steps: 12
# kills: forward, backward, optimizer, tail, idle, save, moment, optimizer
# parallelism: pipeline 2 x tensor 2
# patience: 250

from tests.frameworks.torchtitan import _example

_example.main(pipeline_parallel=2, tensor_parallel=2)
