"""All names of Megatron that this plugin uses; other modules import them from here.

They change between releases, see docs/guides/megatron.md. We also replace
`training.get_forward_backward_func` and `dataset_utils.compile_helpers`.
"""

# Groups of ranks; functions are used as `parallel_state.NAME`.
from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utils
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.enums import ModelType

# Models: the parts of GPTModel, and the places of our attention and norms.
from megatron.core.models.gpt.gpt_layer_specs import TransformerLayerSubmodules
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

# The trainer and its builders.
from megatron.training import get_args, pretrain, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import add_megatron_arguments, parse_and_validate_args, parse_args
from megatron.training.checkpointing import load_args_from_checkpoint
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig, default_layer_spec
