"""The paper's figures, of any dataset."""
