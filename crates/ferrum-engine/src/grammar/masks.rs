//! Masks, and the threads that compute them while a step runs.

use super::error_text::short_text;
use ferrum_types::TokenId;
use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most threads. A mask usually takes well below a millisecond, a step many milliseconds.
const MAX_THREADS: usize = 4;

/// The tokens that may come next. Empty: the text is complete and nothing can follow.
#[derive(Clone, Debug)]
pub(crate) struct Mask {
    bits: SimpleVob,
    empty: bool,
}

impl Mask {
    /// The tokens that may follow the text that `matcher` has consumed; of `ends`, all if the text may end here, else
    /// none.
    ///
    /// # Errors
    /// If the grammar takes more work than the limits allow, or allows no continuation.
    pub(super) fn of(
        matcher: &mut Matcher,
        ends: &[TokenId],
        vocab: usize,
    ) -> Result<Self, String> {
        let failed = |error: String| short_text(&error);
        if matcher.is_stopped() {
            return match matcher.get_error() {
                Some(error) => Err(failed(error)),
                None => Ok(Self {
                    bits: SimpleVob::alloc(vocab),
                    empty: true,
                }),
            };
        }
        let may_end = matcher.is_accepting().map_err(|e| failed(e.to_string()))?;
        let mut bits = matcher.compute_mask().map_err(|e| failed(e.to_string()))?;
        // The artificial end token of the trie comes after all tokens.
        bits.set(vocab, false);
        for &end in ends {
            bits.set(end as usize, may_end);
        }
        let empty = bits.is_zero();
        Ok(Self { bits, empty })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.empty
    }

    pub(crate) fn allows(&self, token: TokenId) -> bool {
        (token as usize) < self.bits.len() && self.bits.is_allowed(token)
    }

    /// A bit for each of `vocab` tokens, from the least significant one of the first word on.
    pub(crate) fn words(&self, vocab: usize) -> &[u32] {
        let words = self.bits.as_slice();
        &words[..words.len().min(vocab.div_ceil(u32::BITS as usize))]
    }

    /// Whether it allows no token except some of `tokens`.
    pub(super) fn allows_only(&self, tokens: &[TokenId]) -> bool {
        let mut rest = self.bits.clone();
        for &token in tokens.iter().filter(|&&token| self.allows(token)) {
            rest.set(token as usize, false);
        }
        rest.is_zero()
    }

    /// Sets the logits of forbidden tokens to minus infinity.
    pub(crate) fn apply(&self, logits: &mut [f32]) {
        let words = self.bits.as_slice();
        for (&word, logits) in words.iter().zip(logits.chunks_mut(u32::BITS as usize)) {
            match word {
                0 => logits.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                _ => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

/// Masks that a step needs of one sequence.
pub(super) struct Job {
    pub(super) matcher: Box<Matcher>,
    /// Drafts of the tokens from the next on.
    pub(super) draft: Vec<TokenId>,
    pub(super) ends: Arc<[TokenId]>,
    pub(super) vocab: usize,
}

/// Result of a [`Job`]: the matcher as it was, and masks for the next token and for the one after
/// each draft token, as far as the draft is allowed.
pub(super) struct Done {
    pub(super) matcher: Box<Matcher>,
    /// Computation time, without the time in the queue.
    pub(super) time: Duration,
    pub(super) masks: Result<Vec<Mask>, String>,
}

impl Job {
    pub(super) fn run(mut self) -> Done {
        let started = Instant::now();
        let masks = self.masks();
        Done {
            time: started.elapsed(),
            matcher: self.matcher,
            masks,
        }
    }

    fn masks(&mut self) -> Result<Vec<Mask>, String> {
        let first = Mask::of(&mut self.matcher, &self.ends, self.vocab)?;
        if self.draft.is_empty() {
            return Ok(vec![first]);
        }
        let mut masks = vec![first];
        let mut ahead = self.matcher.clone();
        for &token in &self.draft {
            // Rows after a forbidden draft token are not used.
            let allowed = masks.last().is_some_and(|mask| mask.allows(token));
            if !allowed || self.ends.contains(&token) || ahead.consume_token(token).is_err() {
                break;
            }
            match Mask::of(&mut ahead, &self.ends, self.vocab) {
                Ok(mask) => masks.push(mask),
                Err(_) => break,
            }
        }
        Ok(masks)
    }
}

type Task = (Job, Sender<Done>);

/// Threads for [`Job`]s. Dropping it waits for them.
pub(crate) struct MaskThreads {
    tasks: Option<Sender<Task>>,
    threads: Vec<JoinHandle<()>>,
}

impl MaskThreads {
    /// Starts half as many threads as there are cores: the others compute the step.
    pub(crate) fn start() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let (tasks, inbox) = mpsc::channel();
        let inbox = Arc::new(Mutex::new(inbox));
        let spawn = |_| {
            let inbox = Arc::clone(&inbox);
            let body = move || while next(&inbox).is_some_and(run) {};
            let thread = std::thread::Builder::new().name("ferrum-masks".into());
            thread.spawn(body).ok()
        };
        let threads = (0..(cores / 2).clamp(1, MAX_THREADS)).filter_map(spawn);
        Self {
            threads: threads.collect(),
            tasks: Some(tasks),
        }
    }

    /// Submits a job. Without threads it runs at once.
    pub(super) fn submit(&self, job: Job) -> Receiver<Done> {
        let (done, receiver) = mpsc::channel();
        let tasks = self.tasks.as_ref().filter(|_| !self.threads.is_empty());
        match tasks {
            Some(tasks) => {
                // If all threads have ended, the receiver reports it.
                let _ = tasks.send((job, done));
            }
            None => {
                let _ = done.send(job.run());
            }
        }
        receiver
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        self.tasks = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn next(inbox: &Mutex<Receiver<Task>>) -> Option<Task> {
    let inbox = inbox.lock().unwrap_or_else(PoisonError::into_inner);
    inbox.recv().ok()
}

/// Runs a task. The parser catches its own panics; another panic ends the thread and disconnects the receiver.
fn run((job, done): Task) -> bool {
    // A sequence that has ended has no receiver.
    let _ = done.send(job.run());
    true
}
