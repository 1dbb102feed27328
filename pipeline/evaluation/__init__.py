"""The paper's nine evaluation sets by its protocol, and measures that separate small students."""
