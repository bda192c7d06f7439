"""Add-ons to methods, written after the name: fine-tuning (`fedavg+ft`), heads (`fedavg+svm`), probes."""
