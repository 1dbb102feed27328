"""Teacher-guided pretraining inside Megatron-Core."""

from vocag_cli import require_own_packages

require_own_packages()  # torchrun's processes import this first, and it imports `pipeline` next
