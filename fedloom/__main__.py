"""`python -m fedloom`: same as the command `fedloom`."""

from fedloom.cli import main

if __name__ == "__main__":
    main()
