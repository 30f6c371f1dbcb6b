//! Choosing tokens on the device, so that rows of logits stay there: a row is as long as the vocabulary, and what the
//! host wants of it is four bytes.

use super::{Backend, DeviceBuffer, Logits};
use ferrum_types::{Error, Result, TokenId};
use std::fmt;

/// Most alternatives whose log-probabilities a device gives.
pub const MAX_LOGPROBS: usize = 32;

/// How the token of one row is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSampling {
    /// 0: the most likely token; else logits are divided by it.
    pub temperature: f32,
    /// Only so many of the most likely tokens; 0: all.
    pub top_k: u32,
    /// Only the most likely tokens that together reach this probability; from 1 on: all.
    pub top_p: f32,
    /// Only tokens at least this probable relative to the most likely one; 0: all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that are [recent](TokenChange::recent).
    pub repeat_penalty: f32,
    /// Taken from the logit of each token of the answer.
    pub presence_penalty: f32,
    /// Taken from the logit of each token of the answer as often as it is there.
    pub frequency_penalty: f32,
    /// Where the draw falls, from 0 to below 1.
    pub unit: f64,
    /// The row of the step before whose choice is the last token of the sequence, where the host does not know it
    /// yet: it is recent, and one more of the answer.
    pub last: Option<u32>,
    /// Alternatives whose log-probabilities are wanted beside that of the token, at most [`MAX_LOGPROBS`]; `None`:
    /// no log-probabilities. They are those of the row as it came, before the chain.
    pub logprobs: Option<u32>,
}

impl Default for RowSampling {
    /// The most likely token.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            unit: 0.0,
            last: None,
            logprobs: None,
        }
    }
}

impl RowSampling {
    /// Whether a draw goes through the most likely tokens first, and not through ids.
    pub fn draws_by_rank(&self, vocab: usize) -> bool {
        self.top_p < 1.0 || self.cuts_to_k(vocab)
    }

    /// Whether top-k leaves anything out of a row of `vocab` logits.
    pub fn cuts_to_k(&self, vocab: usize) -> bool {
        self.top_k > 0 && (self.top_k as usize) < vocab
    }

    /// `logit` after the repetition penalty.
    pub fn repeated(&self, logit: f32) -> f32 {
        match logit > 0.0 {
            true => logit / self.repeat_penalty,
            false => logit * self.repeat_penalty,
        }
    }

    /// `logit` of a token that is in the sequence or has a bias.
    pub fn changed(&self, logit: f32, change: &TokenChange) -> f32 {
        let mut x = logit + change.bias;
        if change.recent {
            x = self.repeated(x);
        }
        if change.generated > 0 {
            x -= self.presence_penalty + self.frequency_penalty * change.generated as f32;
        }
        x
    }
}

/// A token whose logit in a row is not what the model said.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenChange {
    /// Which.
    pub token: u32,
    /// Added to its logit; −∞ forbids it.
    pub bias: f32,
    /// Whether it is among the tokens that the repetition penalty looks at.
    pub recent: bool,
    /// How often it is in the answer.
    pub generated: u32,
}

impl TokenChange {
    /// A token that nothing is changed of yet.
    pub fn none(token: u32) -> Self {
        Self {
            token,
            bias: 0.0,
            recent: false,
            generated: 0,
        }
    }

    /// The same when the token comes once more in the answer.
    #[must_use]
    pub fn once_more(self) -> Self {
        Self {
            recent: true,
            generated: self.generated.saturating_add(1),
            ..self
        }
    }
}

/// How the tokens of some rows are chosen. Made to be filled again: a steady step allocates nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampleBatch {
    rows: Vec<RowSampling>,
    changes: Vec<TokenChange>,
    /// Where the changes and the words of each row's mask end.
    ends: Vec<(usize, usize)>,
    masks: Vec<u32>,
}

impl SampleBatch {
    /// Empties it.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.changes.clear();
        self.ends.clear();
        self.masks.clear();
    }

    /// Adds a row. Of `changes` a token may be in one only. `mask` has a bit for each token, from the least
    /// significant one of its first word on, set where the token is allowed; a token behind its end is forbidden.
    pub fn push(
        &mut self,
        row: RowSampling,
        changes: impl IntoIterator<Item = TokenChange>,
        mask: Option<&[u32]>,
    ) {
        self.rows.push(row);
        self.changes.extend(changes);
        self.masks.extend_from_slice(mask.unwrap_or_default());
        self.ends.push((self.changes.len(), self.masks.len()));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Row `index`, its changes, and its mask: empty where all is allowed.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn row(&self, index: usize) -> (&RowSampling, &[TokenChange], &[u32]) {
        let (first, first_word) = match index {
            0 => (0, 0),
            _ => self.ends[index - 1],
        };
        let (end, end_word) = self.ends[index];
        let changes = &self.changes[first..end];
        (
            &self.rows[index],
            changes,
            &self.masks[first_word..end_word],
        )
    }

    /// The rows.
    pub fn rows(&self) -> &[RowSampling] {
        &self.rows
    }

    /// Changes of all rows, one row after the other.
    pub fn changes(&self) -> &[TokenChange] {
        &self.changes
    }

    /// Words of all masks, one row after the other.
    pub fn masks(&self) -> &[u32] {
        &self.masks
    }

    /// Holds the rows against the buffers of [`BackendSample::sample_rows`].
    ///
    /// # Errors
    /// Those of `sample_rows`.
    pub fn check<B: Backend>(
        &self,
        logits: &Logits<B>,
        shape: SampleShape,
        previous: &B::Buffer<i32>,
        out: &Sampled<B>,
    ) -> Result<()> {
        const OP: &str = "sample_rows";
        let fail = |reason: String| Err(Error::invalid(OP, reason));
        let SampleShape { vocab, first } = shape;
        if vocab == 0 || i32::try_from(vocab).is_err() {
            return fail(format!(
                "rows have {vocab} logits, expected 1 to {}",
                i32::MAX
            ));
        }
        let end = first.saturating_add(self.len());
        Error::check_len(OP, "logits", logits.len(), end.saturating_mul(vocab))?;
        Error::check_len(OP, "tokens", out.tokens.len(), end)?;
        let beside = end.saturating_mul(1 + MAX_LOGPROBS);
        Error::check_len(OP, "ranks", out.ranks.len(), beside)?;
        Error::check_len(OP, "logprobs", out.logprobs.len(), beside)?;
        for index in 0..self.len() {
            let (row, changes, _) = self.row(index);
            let last = row.last.map_or(0, |last| last as usize + 1);
            Error::check_len(OP, "previous", previous.len(), last)?;
            let settings = [
                ("temperature", row.temperature, 0.0..=f32::MAX),
                ("top-p", row.top_p, 0.0..=f32::MAX),
                ("min-p", row.min_p, 0.0..=1.0),
                (
                    "the repetition penalty",
                    row.repeat_penalty,
                    f32::MIN_POSITIVE..=f32::MAX,
                ),
                ("the number drawn", row.unit as f32, 0.0..=1.0),
            ];
            if let Some((name, found, _)) = settings.iter().find(|(_, x, good)| !good.contains(x)) {
                return fail(format!("row {index}: {name} is {found}"));
            }
            if let Some(n) = row.logprobs.filter(|&n| n as usize > MAX_LOGPROBS) {
                return fail(format!(
                    "row {index}: {n} log-probabilities, at most {MAX_LOGPROBS}"
                ));
            }
            if let Some(change) = changes.iter().find(|c| c.token as usize >= vocab) {
                let token = change.token;
                return fail(format!(
                    "row {index}: token {token} of a vocabulary of {vocab}"
                ));
            }
        }
        Ok(())
    }
}

/// A token and its natural log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Which token.
    pub token: TokenId,
    /// At most 0; `-inf` for what cannot be.
    pub logprob: f32,
}

/// What the model thought of a token and of its rivals, before anybody chose.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// The token that is there.
    pub chosen: TokenLogprob,
    /// Its place among all tokens, 1 for the most likely.
    pub rank: usize,
    /// The most likely tokens, best first, lower ids first among equals.
    pub top: Vec<TokenLogprob>,
}

impl Logprobs {
    /// Of a row of [`Sampled`]: its token, its [ranks](Sampled::ranks) and its [log-probabilities](Sampled::logprobs),
    /// with `top` alternatives.
    pub fn of_row(token: TokenId, ranks: &[i32], logprobs: &[f32], top: usize) -> Self {
        let all = ranks.iter().zip(logprobs);
        let best = all.skip(1).take(top).filter_map(|(&token, &logprob)| {
            let token = TokenId::try_from(token).ok()?;
            Some(TokenLogprob { token, logprob })
        });
        Self {
            chosen: TokenLogprob {
                token,
                logprob: logprobs.first().copied().unwrap_or(f32::NEG_INFINITY),
            },
            rank: ranks.first().map_or(0, |&rank| rank as usize),
            top: best.collect(),
        }
    }
}

/// Why no token can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoToken {
    /// No logit of those in question is a number.
    NotANumber,
    /// Everything is forbidden.
    Forbidden,
}

impl NoToken {
    /// What stands for it in place of a token.
    pub const fn code(self) -> i32 {
        match self {
            NoToken::NotANumber => -1,
            NoToken::Forbidden => -2,
        }
    }

    /// The token that `code` is, or why there is none.
    ///
    /// # Errors
    /// Why there is none.
    pub fn or_token(code: i32) -> std::result::Result<TokenId, Self> {
        match TokenId::try_from(code) {
            Ok(token) => Ok(token),
            Err(_) if code == Self::Forbidden.code() => Err(Self::Forbidden),
            Err(_) => Err(Self::NotANumber),
        }
    }
}

impl fmt::Display for NoToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotANumber => "the model gave no numbers for the next token: its logits are NaN",
            Self::Forbidden => "the request leaves no token that may come next",
        })
    }
}

impl std::error::Error for NoToken {}

/// What became of rows, on the device.
pub struct Sampled<B: Backend> {
    /// `[rows]`: the token, or the [code](NoToken::code) of why there is none.
    pub tokens: B::Buffer<i32>,
    /// `[rows, 1 + MAX_LOGPROBS]`, where log-probabilities are wanted: the rank of the token (1: the most likely),
    /// then the most likely tokens, best first; −1 behind the last that is a number.
    pub ranks: B::Buffer<i32>,
    /// `[rows, 1 + MAX_LOGPROBS]`: their natural log-probabilities, that of the token first.
    pub logprobs: B::Buffer<f32>,
}

impl<B: Backend> Sampled<B> {
    /// Room for `rows` rows.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn alloc(device: &B, rows: usize) -> Result<Self> {
        Ok(Self {
            tokens: device.alloc(rows)?,
            ranks: device.alloc(rows * (1 + MAX_LOGPROBS))?,
            logprobs: device.alloc(rows * (1 + MAX_LOGPROBS))?,
        })
    }
}

/// Which rows of logits a [`SampleBatch`] speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleShape {
    /// Logits in a row.
    pub vocab: usize,
    /// The row of the batch's first row among those of the logits, and of the results.
    pub first: usize,
}

/// Chooses tokens by more than the greatest logit. By default a device does not, and the host reads the rows.
///
/// One that [samples](Self::samples) goes through this chain for a row:
///
/// 1. tokens outside a mask are forbidden
/// 2. biases are added
/// 3. the repetition penalty, then presence and frequency penalties
/// 4. a temperature of 0 ends here: the most likely token, the lowest id of equals
/// 5. temperature
/// 6. top-k, top-p, min-p: each of what the one before it left
/// 7. a draw: the token at which the cumulated probability passes a number that the host has drawn. Where top-k or
///    top-p cuts, the most likely tokens come first (the lowest id of equals), else the order is that of ids
///
/// Probabilities are in proportion to `exp(logit / temperature)`; NaN and −∞ have none. It is the host samplers'
/// chain (`ferrum-engine`), as far as that has these steps, and chance is the host's: the same seed gives the same
/// text on whatever chooses, but for roundings of sums that a draw can fall between.
pub trait BackendSample: Backend {
    /// Whether [`sample_rows`](Self::sample_rows) works.
    fn samples(&self) -> bool {
        false
    }

    /// Puts tokens that `chosen` holds among those of a step: for each `(place, row)`, `tokens[place] = chosen[row]`.
    /// By default a copy for each.
    ///
    /// # Errors
    /// `Shape` for a place or row that there is not.
    fn take_tokens(
        ctx: &mut Self::Context,
        chosen: &Self::Buffer<i32>,
        places: &[(u32, u32)],
        tokens: &mut Self::Buffer<i32>,
    ) -> Result<()> {
        for &(place, row) in places {
            let (from, to) = ((chosen, row as usize), (&mut *tokens, place as usize));
            Self::copy_slice(ctx, from.0, from.1, to.0, to.1, 1)?;
        }
        Ok(())
    }

    /// Chooses a token from each of the rows `shape.first..` of `logits`, `[rows, vocab]`, as
    /// [`BackendSample`] says, into the same rows of `out`. `previous` holds the [tokens](Sampled::tokens) of the step
    /// before, for rows that have a [`last`](RowSampling::last) one. The rows of `logits` may be changed.
    ///
    /// # Errors
    /// `Shape` for a buffer that is too short; `InvalidArgument` for settings out of range; `Unsupported` where the
    /// device does not sample.
    fn sample_rows(
        ctx: &mut Self::Context,
        logits: &mut Logits<Self>,
        shape: SampleShape,
        batch: &SampleBatch,
        previous: &Self::Buffer<i32>,
        out: &mut Sampled<Self>,
    ) -> Result<()> {
        let _ = (ctx, logits, shape, batch, previous, out);
        Err(Error::Unsupported {
            op: "sample_rows",
            backend: Self::NAME,
            reason: "this backend does not choose tokens".into(),
            hint: "read the rows of logits and choose on the host".into(),
        })
    }
}
