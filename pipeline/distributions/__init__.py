"""What a teacher expects next, in the student's vocabulary; no torch."""
