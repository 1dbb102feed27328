"""Sources of a teacher's losses: transformers here, or servers of completions.

One interface, `pipeline.scoring.engines.interface.Engine`: documents' tokens and pieces in, one
loss per token out. Each is imported only for use: asking a server needs no torch.
"""
