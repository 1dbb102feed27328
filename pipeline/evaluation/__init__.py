"""The paper's nine evaluation sets by its protocol, and what tells small students apart."""
