"""The vocabulary of all other packages: keys, requests, results and abstract contracts."""
