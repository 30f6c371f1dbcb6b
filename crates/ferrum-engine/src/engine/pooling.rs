//! Pools the hidden states of a text into one vector.

pub use ferrum_models::{DenseLayers, EmbeddingPrompts, Pooling};

/// Pooled states of the tokens so far.
#[derive(Debug)]
pub(super) struct PoolingState {
    pooling: Pooling,
    /// In f64 and in the order of positions, so that chunks change no bit.
    sum: Vec<f64>,
    /// Number of positions in `sum`.
    seen: usize,
}

impl PoolingState {
    pub(super) fn new(pooling: Pooling, dim: usize) -> Self {
        Self {
            pooling,
            sum: vec![0.0; dim],
            seen: 0,
        }
    }

    /// Adds the state at a position. Positions that were added before a preemption are not counted twice.
    pub(super) fn add(&mut self, position: usize, state: &[f32]) {
        if position < self.seen {
            return;
        }
        self.seen = position + 1;
        for (sum, &x) in self.sum.iter_mut().zip(state) {
            *sum = match self.pooling {
                Pooling::Cls if position > 0 => *sum,
                Pooling::Last | Pooling::Cls => x.into(),
                Pooling::Mean => *sum + f64::from(x),
            };
        }
    }

    pub(super) fn vector(&self) -> Vec<f32> {
        let parts = match self.pooling {
            Pooling::Last | Pooling::Cls => 1.0,
            Pooling::Mean => self.seen.max(1) as f64,
        };
        self.sum.iter().map(|sum| (sum / parts) as f32).collect()
    }
}
