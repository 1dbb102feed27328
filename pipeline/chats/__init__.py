"""Conversations: from messages to a document's bytes and each side's proven rendering."""
