"""Teacher-guided pretraining inside Megatron-Core."""

from vocag.own_packages import require_own_packages

require_own_packages()  # torchrun's processes import this first, and it imports `pipeline` next
