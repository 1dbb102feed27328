"""What every rank does first, done once in the process that ranks are forked from."""

from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.streaming import AlignedRows, Reading, StreamConfig
from tests.megatron_plugin.models import FAMILIES, make_model
from tests.support.datasets import build_dataset

for family in FAMILIES:  # loads their code
    make_model(family)
with TemporaryDirectory() as folder:  # compiled loops are loaded when they are first called
    build_dataset(Path(folder))
    AlignedRows(StreamConfig(Reading(folder), seq_length=64, cache_folder=Path(folder)))[0]
