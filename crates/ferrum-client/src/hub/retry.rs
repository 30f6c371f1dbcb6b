//! Asking again, and not too often.

use crate::{ClientError, Result};
use std::time::Duration;

/// Longest wait that a server can ask for.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// How often, and after how long, a request is repeated that may yet succeed.
#[derive(Debug, Clone, Copy)]
pub struct Retries {
    /// Attempts without any progress, the first included.
    pub attempts: u32,
    /// Time before the second attempt. It doubles each time.
    pub pause: Duration,
}

impl Default for Retries {
    fn default() -> Self {
        Self {
            attempts: 5,
            pause: Duration::from_millis(500),
        }
    }
}

/// Attempts that have been made.
pub(super) struct Attempts {
    retries: Retries,
    failed: u32,
}

impl Attempts {
    pub(super) fn new(retries: Retries) -> Self {
        Self { retries, failed: 0 }
    }

    /// There was progress: counts attempts from zero again.
    pub(super) fn reset(&mut self) {
        self.failed = 0;
    }

    /// Waits before the next attempt; returns the error where there is none.
    pub(super) async fn back_off(&mut self, error: ClientError) -> Result<()> {
        self.failed += 1;
        if !error.is_transient() || self.failed >= self.retries.attempts {
            return Err(error);
        }
        let asked = match &error {
            ClientError::Refused { retry_after, .. } => retry_after.map(Duration::from_secs),
            _ => None,
        };
        let doubled = self.retries.pause * 2u32.saturating_pow(self.failed - 1).min(1 << 10);
        let wait = asked.unwrap_or(doubled).min(MAX_WAIT);
        let (reason, failed) = (error.to_string(), self.failed);
        tracing::info!(reason, failed, seconds = wait.as_secs_f64(), "trying again");
        tokio::time::sleep(wait).await;
        Ok(())
    }
}
