"""Training steps that are recorded once and repeated, for one client or vectorised over several, on any device."""
