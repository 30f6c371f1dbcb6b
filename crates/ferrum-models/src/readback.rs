//! What comes back of a step: [`Readback`] says what the host wants of each row, [`StepOutput`] holds it.
//!
//! Reading is by need. A row of logits is as long as the vocabulary, a chosen token is four bytes, and most rows
//! need no more than that.

use ferrum_kernels::{Logprobs, NoToken};
use ferrum_types::TokenId;

/// How a device chooses the next token from a row of logits by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// The most likely token, the lowest id of equals. Every runner can.
    Greedy,
    /// As the next row of the step's [`sampling`](crate::StepBatch::sampling) says: its rows are these, in order. For
    /// runners that [sample](crate::DecoderRunner::samples).
    Sampled,
}

/// What is read back of the logits of a row that a [`StepBatch`](crate::StepBatch) lists in `logit_rows`. Beside that, and
/// whatever it is, the hidden states of the rows in its `hidden_rows` and `aux_hidden` are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readback {
    /// Nothing: the row is not computed.
    Nothing,
    /// The token that the device chooses.
    Token(DeviceChoice),
    /// All its logits, `[vocab]`.
    Logits,
}

impl Readback {
    /// The most likely token.
    pub const GREEDY: Self = Self::Token(DeviceChoice::Greedy);

    /// A token as the batch's sampling says.
    pub const SAMPLED: Self = Self::Token(DeviceChoice::Sampled);
}

/// A step that was submitted and not collected yet. A runner numbers its steps.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a step is to be collected"]
pub struct Ticket(u64);

impl Ticket {
    /// The ticket of the step with this number.
    pub fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number of the step.
    pub fn number(&self) -> u64 {
        self.0
    }
}

/// What was read of one row.
#[derive(Debug, PartialEq)]
pub enum RowOutput<'a> {
    /// Nothing was wanted.
    Nothing,
    /// The token that the device chose, and its log-probabilities where they were wanted.
    Token(TokenId, Option<&'a Logprobs>),
    /// The device was to choose a token, and there is none.
    NoToken(NoToken),
    /// `[vocab]`.
    Logits(&'a mut [f32]),
}

#[derive(Clone, Copy, Debug)]
enum Row {
    Nothing,
    /// The token, and the place of its log-probabilities.
    Chosen(Result<TokenId, NoToken>, Option<usize>),
    /// Place among the rows whose logits were read.
    Logits(usize),
}

/// What was read of a step. Made to be filled again: in a steady state that allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    rows: Vec<Row>,
    vocab: usize,
    logits: Vec<f32>,
    logprobs: Vec<Logprobs>,
    hidden: Vec<f32>,
    aux_hidden: Vec<f32>,
}

impl StepOutput {
    /// Makes room for rows of logits as `wanted` says, and for `hidden` numbers of hidden states. What the room
    /// holds is not defined; no token is chosen, and no auxiliary hidden state read.
    pub fn begin(&mut self, wanted: &[Readback], vocab: usize, hidden: usize) {
        let mut read = 0;
        self.rows.clear();
        self.rows.extend(wanted.iter().map(|wanted| match wanted {
            Readback::Nothing => Row::Nothing,
            Readback::Token(_) => Row::Chosen(Err(NoToken::NotANumber), None),
            Readback::Logits => {
                read += 1;
                Row::Logits(read - 1)
            }
        }));
        self.vocab = vocab;
        self.logprobs.clear();
        self.logits.resize(read * vocab, 0.0);
        self.hidden.resize(hidden, 0.0);
        self.aux_hidden.clear();
    }

    /// Says what the device chose in `row`, where a token is wanted.
    pub fn set_token(&mut self, row: usize, token: Result<TokenId, NoToken>) {
        if let Some(Row::Chosen(chosen, _)) = self.rows.get_mut(row) {
            *chosen = token;
        }
    }

    /// Sets the log-probabilities of the token that was chosen in `row`.
    pub fn set_logprobs(&mut self, row: usize, logprobs: Logprobs) {
        if let Some(Row::Chosen(_, place)) = self.rows.get_mut(row) {
            *place = Some(self.logprobs.len());
            self.logprobs.push(logprobs);
        }
    }

    /// Sets the token that the device chose, and its log-probabilities, for each row of which a token is wanted, in order.
    /// `each` is given how many such rows were before.
    ///
    /// # Errors
    /// Those of `each`.
    pub fn set_tokens(
        &mut self,
        mut each: impl FnMut(
            usize,
        )
            -> ferrum_types::Result<(Result<TokenId, NoToken>, Option<Logprobs>)>,
    ) -> ferrum_types::Result<()> {
        let Self { rows, logprobs, .. } = self;
        let chosen = rows.iter_mut().filter_map(|row| match row {
            Row::Chosen(token, at) => Some((token, at)),
            Row::Nothing | Row::Logits(_) => None,
        });
        for (place, (token, at)) in chosen.enumerate() {
            let told;
            (*token, told) = each(place)?;
            if let Some(told) = told {
                *at = Some(logprobs.len());
                logprobs.push(told);
            }
        }
        Ok(())
    }

    /// What was read of row `row` of the batch's `logit_rows`; nothing for a row that is not there.
    pub fn row(&mut self, row: usize) -> RowOutput<'_> {
        match self.rows.get(row) {
            None | Some(Row::Nothing) => RowOutput::Nothing,
            Some(Row::Chosen(Ok(token), place)) => {
                let logprobs = place.and_then(|place| self.logprobs.get(place));
                RowOutput::Token(*token, logprobs)
            }
            Some(Row::Chosen(Err(none), _)) => RowOutput::NoToken(*none),
            Some(Row::Logits(at)) => {
                RowOutput::Logits(&mut self.logits[at * self.vocab..][..self.vocab])
            }
        }
    }

    /// The rows whose tokens the device was to choose, in order: row and token.
    pub fn tokens(&self) -> impl Iterator<Item = (usize, Result<TokenId, NoToken>)> {
        let rows = self.rows.iter().enumerate();
        rows.filter_map(|(index, row)| match row {
            Row::Chosen(token, _) => Some((index, *token)),
            Row::Nothing | Row::Logits(_) => None,
        })
    }

    /// The logits of those rows that were to be read, in order: `[rows, vocab]`.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// The same, to be written.
    pub fn logits_mut(&mut self) -> &mut [f32] {
        &mut self.logits
    }

    /// The rows whose logits were read, in order: row and logits.
    pub fn logit_rows_mut(&mut self) -> impl Iterator<Item = (usize, &mut [f32])> {
        let rows = self.rows.iter().enumerate();
        let read = rows.filter_map(|(index, row)| matches!(row, Row::Logits(_)).then_some(index));
        read.zip(self.logits.chunks_exact_mut(self.vocab.max(1)))
    }

    /// Hidden states after the final norm: `[hidden_rows, hidden]`.
    pub fn hidden(&self) -> &[f32] {
        &self.hidden
    }

    /// The batch's auxiliary hidden states, in their order: `[aux_hidden, hidden]`.
    pub fn aux_hidden(&self) -> &[f32] {
        &self.aux_hidden
    }

    /// Makes room for so many numbers of auxiliary hidden states.
    pub(crate) fn begin_aux_hidden(&mut self, len: usize) {
        self.aux_hidden.resize(len, 0.0);
    }

    pub(crate) fn aux_hidden_mut(&mut self) -> &mut [f32] {
        &mut self.aux_hidden
    }

    /// The same, to be written.
    pub fn hidden_mut(&mut self) -> &mut [f32] {
        &mut self.hidden
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_hold_what_was_wanted_of_them() {
        let mut output = StepOutput::default();
        let (token, logits) = (Readback::GREEDY, Readback::Logits);
        output.begin(&[logits, token, Readback::Nothing, token, logits], 2, 3);
        output.set_token(1, Ok(7));
        // A row of which something else is wanted has no token.
        output.set_token(0, Ok(9));
        output.logits_mut().copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(output.row(0), RowOutput::Logits(&mut [1.0, 2.0]));
        assert_eq!(output.row(1), RowOutput::Token(7, None));
        let told = Logprobs::of_row(7, &[1, 7, -1], &[-0.5, -0.5, 0.0], 2);
        assert_eq!(told.top.len(), 1);
        output.set_logprobs(1, told.clone());
        assert_eq!(output.row(1), RowOutput::Token(7, Some(&told)));
        assert_eq!(output.row(2), RowOutput::Nothing);
        let none = NoToken::NotANumber;
        assert_eq!(output.row(3), RowOutput::NoToken(none));
        assert_eq!(output.row(4), RowOutput::Logits(&mut [3.0, 4.0]));
        assert_eq!(output.row(5), RowOutput::Nothing);
        let tokens: Vec<_> = output.tokens().collect();
        assert_eq!(tokens, [(1, Ok(7)), (3, Err(none))]);
        let read: Vec<_> = output.logit_rows_mut().map(|(row, _)| row).collect();
        assert_eq!(read, [0, 4]);
        assert_eq!(output.hidden().len(), 3);
    }
}
