"""Secure aggregation: the server gets the sum of clients' messages, and each message only masked.

The protocol is that of Bonawitz et al. (2017) with a complete graph of pairs. Flower 1.41 has SecAgg+, which fedloom
does not use: it expands masks with a generator of 32 bits of seed, does not sign the clients' keys, clips values
silently, knows one weight per client, and lives in Flower's ClientApp, which fedloom does not run.

- `settings`: the recipe section `secure`
- `shamir`, `ring`, `masks`: secret sharing, fixed-point numbers, masks
- `party`, `coordinator`: a client's and the server's side of a round; `protocol`: what they exchange
- `weighted`, `private`: what a client adds to the sum, and how the server reads the sum
- `average`: the sum in place of `server.average`; `simulation`: clients in this process
"""
