//! Limits request bodies, and images that are fetched for requests: one limit per body, one for all.
//!
//! Memory permits are acquired as bytes arrive, so announcing a long body reserves nothing; short bodies need none.
//! Parsed JSON can take 16 times its text, so further permits are acquired by value count before parsing. All are
//! released when the request has been parsed.

use crate::error::ApiError;
use axum::body::{Body, Bytes};
use hyper::body::Body as _;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

/// Bytes of a body that need no permit, and bytes of a permit.
const STEP: usize = 64 << 10;

/// How long a body waits for others in all.
const PATIENCE: Duration = Duration::from_secs(2);

/// Bytes that a value of JSON takes beside its text, about.
const VALUE: usize = 32;

/// Memory permits of a body: for its bytes, and for its values.
pub(crate) type BodyPermits = Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)>;

/// Permits for bytes that come bit by bit.
#[derive(Debug)]
pub(crate) struct BytePermits {
    length: usize,
    /// Bytes that the permits allow.
    room: usize,
    permits: Option<OwnedSemaphorePermit>,
    /// How long further ones may still be waited for.
    patience: Duration,
}

impl Default for BytePermits {
    fn default() -> Self {
        Self {
            length: 0,
            room: STEP,
            permits: None,
            patience: PATIENCE,
        }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct BodyBudget {
    /// Longest body.
    most: usize,
    /// Permits of the budget.
    budget: u32,
    /// A permit for each step of bytes.
    bytes: Arc<Semaphore>,
    /// A permit for each step of memory for values. A body with such permits never waits for bytes.
    values: Arc<Semaphore>,
}

impl BodyBudget {
    /// Bodies of `most` bytes each and `all` together, but at least one of them.
    pub(crate) fn new(most: usize, all: usize) -> Self {
        let max_steps = Semaphore::MAX_PERMITS.min(u32::MAX as usize);
        let steps = all.max(most).div_ceil(STEP).min(max_steps);
        Self {
            most,
            budget: u32::try_from(steps).unwrap_or(u32::MAX),
            bytes: Arc::new(Semaphore::new(steps)),
            values: Arc::new(Semaphore::new(steps)),
        }
    }

    /// Reads a body to its end.
    ///
    /// # Errors
    /// 413 when it is too long, 503 when others leave it no room for a while.
    pub(crate) async fn read(&self, mut body: Body) -> Result<(Bytes, BodyPermits), ApiError> {
        let (mut bytes, mut permits) = (Vec::new(), BytePermits::default());
        let mut values = 0;
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            // The connection is broken, or the length of a chunk is no number.
            let frame = frame.map_err(|_| ApiError::too_large(self.most))?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if data.len() > self.most - bytes.len() {
                return Err(ApiError::too_large(self.most));
            }
            self.acquire(&mut permits, data.len()).await?;
            // Bit by bit: streams of others are written by this thread.
            values += count_values(&data);
            bytes.extend_from_slice(&data);
        }
        let Some(of_bytes) = permits.permits else {
            return Ok((bytes.into(), None));
        };
        let steps = self.permits_for(values);
        let of_values = acquire(&self.values, steps, &mut permits.patience).await?;
        Ok((bytes.into(), Some((of_bytes, of_values))))
    }

    /// Acquires permits for so many more bytes.
    ///
    /// # Errors
    /// 503 when others leave them no room for a while.
    pub(crate) async fn acquire(
        &self,
        permits: &mut BytePermits,
        bytes: usize,
    ) -> Result<(), ApiError> {
        permits.length += bytes;
        while permits.length > permits.room {
            let step = acquire(&self.bytes, 1, &mut permits.patience).await?;
            match &mut permits.permits {
                Some(permits) => permits.merge(step),
                None => permits.permits = Some(step),
            }
            permits.room += STEP;
        }
        Ok(())
    }

    /// Steps that so many values take, but never more than there are: alone, every body is taken.
    fn permits_for(&self, values: usize) -> u32 {
        let steps = values.saturating_mul(VALUE).div_ceil(STEP);
        u32::try_from(steps).unwrap_or(u32::MAX).min(self.budget)
    }
}

/// Values of JSON that a text has, or a few more.
fn count_values(text: &[u8]) -> usize {
    // Eight bytes at once: the crate is compiled for size, without loops of vectors.
    let (words, rest) = text.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let words = words.iter().chain([&last]);
    words.map(|word| value_starts(*word) as usize).sum()
}

/// How many of eight bytes are a comma, a colon, a bracket or a brace that opens.
fn value_starts(word: [u8; 8]) -> u32 {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    const LOW_BITS: u64 = ONES * 0x7f;
    let word = u64::from_ne_bytes(word);
    // The high bit of each byte of `word` that is `byte`: no carry leaves a byte.
    let equal = |word: u64, byte: u8| {
        let differ = word ^ (ONES * u64::from(byte));
        !(((differ & LOW_BITS) + LOW_BITS) | differ | LOW_BITS)
    };
    // A bracket and a brace differ in one bit.
    let opens = equal(word & !(ONES * 0x20), b'[');
    (equal(word, b',') | equal(word, b':') | opens).count_ones()
}

/// Takes permits, waiting no longer than `patience`, of which the time is taken.
async fn acquire(
    budget: &Arc<Semaphore>,
    steps: u32,
    patience: &mut Duration,
) -> Result<OwnedSemaphorePermit, ApiError> {
    let began = Instant::now();
    let permits = Arc::clone(budget).acquire_many_owned(steps);
    let permits = timeout(*patience, permits).await;
    *patience = patience.saturating_sub(began.elapsed());
    match permits {
        Ok(Ok(permits)) => Ok(permits),
        // It is never closed.
        Ok(Err(_)) | Err(_) => Err(ApiError::many_bodies()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_needs_permits_for_its_values() {
        let bodies = BodyBudget::new(1 << 20, 16 << 20);
        let permits = |text: &str| bodies.permits_for(count_values(text.as_bytes()));
        assert_eq!(permits(&format!("\"{}\"", "x".repeat(1 << 20))), 0);
        // 32 bytes for each of the numbers.
        assert_eq!(permits(&"1,".repeat(1 << 17)), 64);
        assert_eq!(permits(&",".repeat(1 << 20)), 256);
        assert_eq!(count_values(br#"{"a": [1, 2.5, {}], "b": ""}"#), 8);
        // Every byte at every place of a word.
        let all: Vec<u8> = (0..=255).chain(*b"{[,:").cycle().take(9 * 260).collect();
        for from in 0..9 {
            let starts = all[from..].iter().filter(|byte| b",:[{".contains(byte));
            assert_eq!(count_values(&all[from..]), starts.count());
        }
    }
}
