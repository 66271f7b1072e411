"""python -m edge_eval."""

from edge_eval.cli import main

if __name__ == "__main__":
    main()
