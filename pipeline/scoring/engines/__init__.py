"""What gives a teacher's losses: transformers here, or servers of completions.

One interface, `pipeline.scoring.engines.interface.Engine`: documents' tokens and pieces in, one
loss a token out. Each is imported only when it is used: a machine that asks a server needs no
torch.
"""
