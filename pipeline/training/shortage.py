"""Which option to change when a machine lacks memory, or a compiler."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.command_line.failures import first_line, hinted
from pipeline.command_line.pasted import pasted
from pipeline.models.devices import lacks_memory
from pipeline.training.config import TrainConfig


@contextmanager
def naming_memory(config: TrainConfig, *, has_checkpoint: bool) -> Iterator[None]:
    """Turn torch's lack of memory or of a compiler, or a reader's end, into a ValueError."""
    try:
        yield
    except RuntimeError as error:
        needs = first_line(error)
        if "DataLoader worker" in needs:  # raised wherever the trainer is
            refusal = ValueError(f"a process that reads ahead has ended ({needs}), as the system "
                                 "ends those that lack memory, or room in /dev/shm")  # fmt: skip
            raise hinted(refusal, "workers=0") from error
        if not lacks_memory(error):
            if not _is_of_compiler(error):
                raise
            refusal = ValueError(f"torch can't compile the student's layers here ({needs}): give"
                                 " it what it lacks, or leave out compile=True")  # fmt: skip
            raise hinted(refusal, "leave out compile=True") from error
        advice = smaller(config, has_checkpoint=has_checkpoint)
        refusal = ValueError(f"the device's memory is too small for this run ({needs}); see vocag "
                             "train --dry-run")  # fmt: skip
        raise hinted(refusal, advice) from error


def _is_of_compiler(error: BaseException) -> bool:
    if "Failed to find C compiler" in str(error):  # Triton's, as a kernel first runs
        return True
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def smaller(config: TrainConfig, *, has_checkpoint: bool = False) -> str:
    """Return the option to change first, with a value, such as "micro_batch_size=2".

    A resumed run keeps its micro-batches, or begins again elsewhere.
    """
    rows = config.micro_batch_size
    if rows > 1 and not has_checkpoint:
        return f"micro_batch_size={next(n for n in range(rows // 2, 0, -1) if rows % n == 0)}"
    if not config.gradient_checkpointing:
        return "gradient_checkpointing=True"
    if has_checkpoint:  # all else would change its weights
        return f"output={pasted(f'{config.output}-2')} {smaller(config)}"
    if config.served.by == "running" and config.kind.needs != "model":
        return "vocag score, and stored_losses= in place of teacher="
    if not config.bf16:
        return "bf16=True"
    return f"seq_length={max(config.seq_length // 2, 1)}"
