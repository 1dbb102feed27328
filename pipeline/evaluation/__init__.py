"""The paper's nine evaluation sets, and measures that separate small students."""
