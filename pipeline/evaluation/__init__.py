"""The paper's nine evaluation sets by its protocol, and what distinguishes small students."""
