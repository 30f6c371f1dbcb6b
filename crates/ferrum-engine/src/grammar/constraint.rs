//! A compiled grammar, and where one answer is in it.

use super::compile::words;
use super::masks::{Done, Job};
use super::{Mask, MaskThreads};
use ferrum_types::TokenId;
use llguidance::Matcher;
use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time of a token that is not counted: most take less than a hundredth of it.
const FAIR_TIME: Duration = Duration::from_millis(50);

/// Most time of an answer beyond that. The work on a grammar is bounded in other ways first; this is for
/// what they do not see, as others wait meanwhile.
const MAX_EXTRA_TIME: Duration = Duration::from_secs(2);

/// A compiled grammar at its beginning. Clones share it.
#[derive(Clone)]
pub struct Constraint {
    /// Behind a lock because it cannot be looked at from several threads at once.
    matcher: Arc<Mutex<Matcher>>,
    vocab_size: usize,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint")
            .field("vocab_size", &self.vocab_size)
            .finish_non_exhaustive()
    }
}

impl Constraint {
    pub(super) fn new(matcher: Matcher, vocab_size: usize) -> Self {
        Self {
            matcher: Arc::new(Mutex::new(matcher)),
            vocab_size,
        }
    }

    /// Number of logits of the models that it is for.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Whether `tokens` may be an answer, whole.
    pub fn accepts(&self, tokens: &[TokenId]) -> bool {
        let mut guide = self.guide(&[]);
        let mut whole = false;
        for &token in tokens {
            let allowed = !whole && guide.mask().is_ok_and(|mask| mask.allows(token));
            match allowed.then(|| guide.accept(token)) {
                Some(Ok(ended)) => whole = ended,
                _ => return false,
            }
        }
        whole || guide.may_end()
    }

    /// A guide for a new answer that `stop_tokens` end.
    pub(crate) fn guide(&self, stop_tokens: &[TokenId]) -> Guide {
        let matcher = self.matcher.lock();
        let matcher = matcher.unwrap_or_else(PoisonError::into_inner).clone();
        // A token of text that somebody wants to stop at is one of the grammar's, too.
        let is_text = |token: TokenId| {
            matcher.tok_env().is_ok_and(|env| {
                let trie = env.tok_trie();
                !trie.token(token).is_empty() && !trie.is_special_token(token)
            })
        };
        let known = stop_tokens.iter().copied();
        let known = known.filter(|&token| (token as usize) < self.vocab_size);
        Guide {
            ends: known.filter(|&token| !is_text(token)).collect(),
            matcher: Some(Box::new(matcher)),
            coming: None,
            masks: VecDeque::new(),
            extra_time: Duration::ZERO,
            vocab_size: self.vocab_size,
        }
    }
}

/// Where an answer is in its grammar.
pub(crate) struct Guide {
    /// Has seen all tokens; away while masks are computed, and for good after a fault.
    matcher: Option<Box<Matcher>>,
    coming: Option<Receiver<Done>>,
    /// For the next rows of logits.
    masks: VecDeque<Mask>,
    /// Tokens that end the answer and are no text.
    ends: Arc<[TokenId]>,
    /// What it took beyond what is fair.
    extra_time: Duration,
    vocab_size: usize,
}

impl Guide {
    /// Has masks computed for the next token and for those after the guesses in `draft`.
    pub(crate) fn begin(&mut self, draft: &[TokenId], threads: &MaskThreads) {
        self.masks.clear();
        if let Some(matcher) = self.matcher.take() {
            self.coming = Some(threads.submit(self.job(matcher, draft)));
        }
    }

    fn job(&self, matcher: Box<Matcher>, draft: &[TokenId]) -> Job {
        Job {
            matcher,
            draft: draft.to_vec(),
            ends: Arc::clone(&self.ends),
            vocab: self.vocab_size,
        }
    }

    /// The mask for the next row of logits.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn mask(&mut self) -> Result<Mask, String> {
        let done = match self.coming.take() {
            Some(coming) => coming.recv().ok(),
            None if self.masks.is_empty() => {
                let matcher = self.matcher.take();
                matcher.map(|matcher| self.job(matcher, &[]).run())
            }
            None => None,
        };
        if let Some(done) = done {
            self.matcher = Some(done.matcher);
            self.masks = done.masks?.into();
            self.count(done.time)?;
        }
        let lost = || "the masks of this answer are lost".to_owned();
        self.masks.pop_front().ok_or_else(lost)
    }

    /// Whether the answer may end here.
    fn may_end(&mut self) -> bool {
        let matcher = self.matcher.as_mut();
        matcher.is_some_and(|matcher| matcher.is_accepting().unwrap_or(false))
    }

    /// Goes on by a token that the last mask allowed and that does not end the answer. Says whether the
    /// text is whole now and nothing can follow.
    ///
    /// # Errors
    /// That the token is not allowed, or that the grammar takes more work than the limits allow.
    pub(crate) fn accept(&mut self, token: TokenId) -> Result<bool, String> {
        let Some(matcher) = &mut self.matcher else {
            return Err("the masks of this answer are lost".into());
        };
        let started = Instant::now();
        let accepted = matcher.consume_token(token);
        accepted.map_err(|e| words(&e.to_string()))?;
        let whole = matcher.is_stopped();
        self.count(started.elapsed())?;
        Ok(whole)
    }

    fn count(&mut self, time: Duration) -> Result<(), String> {
        self.extra_time += time.saturating_sub(FAIR_TIME);
        if self.extra_time > MAX_EXTRA_TIME {
            return Err("it takes too much time to keep to it".into());
        }
        Ok(())
    }
}
