"""The teacher's world: a frozen model that answers with losses."""
