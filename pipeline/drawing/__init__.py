"""Text, pages and charts for people."""
