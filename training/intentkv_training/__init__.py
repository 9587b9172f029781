"""Train the residual head from logs of agents: logs -> labelled examples -> head -> checkpoint, card and evaluation."""
