"""The same model in Paceline and in other engines: what bench/peers.py needs."""
