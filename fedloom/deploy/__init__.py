"""A real federation: the same methods between organisations, over Flower, with TLS and keys (docs/how-to/deploy.md)."""
