//! A compiled grammar, and where one answer is in it.

use super::error_text::short_text;
use super::masks::{Done, Job};
use super::{Mask, MaskThreads};
use ferrum_types::TokenId;
use llguidance::Matcher;
use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time that each token of an answer adds to its budget: most take less than a tenth of it.
const TIME_PER_TOKEN: Duration = Duration::from_millis(10);

/// Budget of an answer at its beginning. The work on a grammar is bounded in other ways first; this is for
/// what they do not see, as others wait meanwhile.
const FIRST_TIME: Duration = Duration::from_secs(2);

/// The time that an answer's masks may take. All of it is charged, so an answer delays the steps that it is in by
/// [`TIME_PER_TOKEN`] each in the mean, and by [`FIRST_TIME`] beyond that in all.
#[derive(Clone, Copy, Debug)]
struct TimeBudget {
    left: Duration,
}

impl TimeBudget {
    fn new() -> Self {
        Self { left: FIRST_TIME }
    }

    /// A token was accepted. Quick tokens do not save up for slow ones.
    fn earn(&mut self) {
        self.left = (self.left + TIME_PER_TOKEN).min(FIRST_TIME);
    }

    /// # Errors
    /// That there is less left than `time`.
    fn charge(&mut self, time: Duration) -> Result<(), String> {
        let left = self.left.checked_sub(time);
        self.left = left.ok_or("it takes too much time to keep to it")?;
        Ok(())
    }
}

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

    /// Whether both came from one compilation.
    #[cfg(test)]
    pub(super) fn is_shared_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.matcher, &other.matcher)
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
        // A stop token that is text may also be part of the grammar.
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
            budget: TimeBudget::new(),
            vocab_size: self.vocab_size,
        }
    }
}

/// Where an answer is in its grammar.
pub(crate) struct Guide {
    /// Has seen all tokens; away while masks are computed, and for good after a fault.
    matcher: Option<Box<Matcher>>,
    coming: Option<Receiver<Done>>,
    /// For the next rows of logits, or why there are none.
    masks: VecDeque<Result<Mask, String>>,
    /// Tokens that end the answer and are no text.
    ends: Arc<[TokenId]>,
    budget: TimeBudget,
    vocab_size: usize,
}

impl Guide {
    /// Has masks computed for the next token and for those after the drafts in `draft`.
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
        self.receive();
        let lost = || Err("the masks of this answer are lost".to_owned());
        self.masks.pop_front().unwrap_or_else(lost)
    }

    /// The same before the step, for a device that chooses the token. `None` where the host has to look: nothing can
    /// follow, or there is no mask, and [`mask`](Self::mask) says why.
    pub(crate) fn mask_for_device(&mut self) -> Option<&Mask> {
        self.receive();
        let mask = self.masks.front()?.as_ref().ok()?;
        (!mask.is_empty()).then_some(mask)
    }

    /// Waits for masks, if there are none.
    fn receive(&mut self) {
        let done = match self.coming.take() {
            Some(coming) => coming.recv().ok(),
            None if self.masks.is_empty() => {
                let matcher = self.matcher.take();
                matcher.map(|matcher| self.job(matcher, &[]).run())
            }
            None => None,
        };
        let Some(done) = done else {
            return;
        };
        self.matcher = Some(done.matcher);
        let charged = self.budget.charge(done.time);
        self.masks = match done.masks.and_then(|masks| charged.map(|()| masks)) {
            Ok(masks) => masks.into_iter().map(Ok).collect(),
            Err(reason) => VecDeque::from([Err(reason)]),
        };
    }

    /// Whether the answer may end here.
    fn may_end(&mut self) -> bool {
        let matcher = self.matcher.as_mut();
        matcher.is_some_and(|matcher| matcher.is_accepting().unwrap_or(false))
    }

    /// Whether `mask` allows nothing but ends of the answer.
    pub(crate) fn only_ends(&self, mask: &Mask) -> bool {
        mask.allows_only(&self.ends)
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
        accepted.map_err(|e| short_text(&e.to_string()))?;
        let whole = matcher.is_stopped();
        self.budget.earn();
        self.budget.charge(started.elapsed())?;
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_every_mask_is_charged() {
        // Milliseconds of each mask, and the tokens after which that is too much.
        let cases = [
            (1, None),
            (10, None),
            (11, Some(1990)),
            (49, Some(51)),
            (2001, Some(0)),
        ];
        for (each, expected) in cases {
            let mut budget = TimeBudget::new();
            let failed = (0..4000).find(|_| {
                let charged = budget.charge(Duration::from_millis(each));
                budget.earn();
                charged.is_err()
            });
            assert_eq!(failed, expected, "{each}");
        }
        // Short masks save nothing up.
        let mut budget = TimeBudget::new();
        (0..4000).for_each(|_| budget.earn());
        assert!(budget.charge(FIRST_TIME).is_ok());
        assert!(budget.charge(Duration::from_millis(1)).is_err());
    }
}
