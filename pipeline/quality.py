"""How good an alignment is (paper, section 2; Fig. 1, 3 and 6). Under construction."""
