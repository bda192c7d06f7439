"""Deployment between organisations: the same methods over Flower, with TLS and signatures (docs/how-to/deploy.md)."""
