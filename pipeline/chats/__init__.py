"""Conversations: messages to a document's bytes, and each side's rendering of them, proven."""
