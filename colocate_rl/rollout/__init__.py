"""From rows of a data set to a batch ready for the loss: sampling order, generation, rewards, advantages."""
