//! What rank 0 tells the others: plain words of 32 bits, with a count before each list.
//!
//! A message is a kind and then the fields of that kind in a fixed order. It comes from another process, so a reader
//! holds every count against the words that remain, and the fields of a step against each other; what the numbers mean
//! to a runner, [`DecoderRunner`](crate::DecoderRunner) checks as it does for every batch. How tokens are sampled is not
//! sent: rank 0 alone chooses, and on the others a row that is sampled there takes the most likely token, which costs
//! nothing and is not looked at.

use crate::batch::{AuxHiddenPoint, AuxHiddenState, BlockTables, StateInit, StepBatch};
use crate::images::ImageRows;
use crate::readback::Readback;
use ferrum_types::{AdapterId, BlockId, Error, Result, StateSlot};
use std::ops::Range;

const OP: &str = "step of a rank";

/// Kinds of messages, the first word of each.
const STEP: u32 = 1;
const ADD_ADAPTER: u32 = 2;
const REMOVE_ADAPTER: u32 = 3;
const STOP: u32 = 4;

/// What the other ranks are to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Run the step that was read.
    Step,
    /// Load the LoRA adapter at this path.
    AddAdapter(AdapterId, String),
    /// Forget it.
    RemoveAdapter(AdapterId),
    /// There are no more steps.
    Stop,
}

/// Writes a step.
///
/// # Errors
/// `InvalidArgument` for what groups do not run: tokens that only a device knows, and features of draft heads.
pub(super) fn write_step(
    batch: &StepBatch,
    wanted: &[Readback],
    words: &mut Vec<u32>,
) -> Result<()> {
    if !batch.pending_tokens.is_empty() || !batch.features.is_empty() {
        let reason = "a group of ranks takes no tokens that are not chosen yet, and no features";
        return Err(Error::invalid(OP, reason));
    }
    words.clear();
    words.push(STEP);
    let mut to = Writer(words);
    to.list(&batch.tokens)?;
    to.list(&batch.positions)?;
    to.list(&batch.query_starts)?;
    to.list(&batch.kv_lens)?;
    to.list(&batch.prompt_lens)?;
    let adapters = batch.adapters.iter();
    to.each(adapters.map(|adapter| option(adapter.map(|id| id.0))))?;
    to.count(batch.block_tables.len())?;
    for BlockTables { blocks, starts } in &batch.block_tables {
        to.each(blocks.iter().map(|block| [block.0]))?;
        to.list(starts)?;
    }
    to.each(batch.state_slots.iter().map(|slot| [slot.0]))?;
    to.each(batch.state_inits.iter().map(|start| {
        let [some, from] = option(start.from.map(|slot| slot.0));
        [start.slot.0, some, from]
    }))?;
    let keeps = batch.state_keeps.iter();
    to.each(keeps.map(|(from, to)| [from.0, to.0]))?;
    to.list(&batch.logit_rows)?;
    to.list(&batch.hidden_rows)?;
    to.each(batch.aux_hidden.iter().map(|tap| match tap.point {
        AuxHiddenPoint::Layer(layer) => [0, layer, tap.row],
        AuxHiddenPoint::FinalNorm => [1, 0, tap.row],
    }))?;
    to.count(batch.images.len())?;
    for image in &batch.images {
        let Range { start, end } = image.rows;
        for number in [image.seq, start, end, image.keys, image.skipped] {
            to.count(number)?;
        }
        to.each(image.embeddings.iter().map(|x| [x.to_bits()]))?;
    }
    to.each(wanted.iter().map(|wanted| match wanted {
        Readback::Nothing => [0],
        Readback::Token(_) => [1],
        Readback::Logits => [2],
    }))
}

/// Writes that an adapter is to be loaded from a path.
///
/// # Errors
/// `InvalidArgument` for a path that is too long.
pub(super) fn write_adapter(id: AdapterId, path: &str, words: &mut Vec<u32>) -> Result<()> {
    words.clear();
    words.extend([ADD_ADAPTER, id.0]);
    Writer(words).each(path.bytes().map(|byte| [byte.into()]))
}

pub(super) fn write_removal(id: AdapterId, words: &mut Vec<u32>) {
    words.clear();
    words.extend([REMOVE_ADAPTER, id.0]);
}

pub(super) fn write_stop(words: &mut Vec<u32>) {
    words.clear();
    words.push(STOP);
}

/// Reads a message; the batch and what is wanted of it are filled by a step alone.
///
/// # Errors
/// `InvalidArgument` says which part does not hold what it should.
pub(super) fn read(
    words: &[u32],
    batch: &mut StepBatch,
    wanted: &mut Vec<Readback>,
) -> Result<Message> {
    let mut from = Reader(words);
    let message = match from.word()? {
        STEP => {
            read_step(&mut from, batch, wanted)?;
            Message::Step
        }
        ADD_ADAPTER => {
            let id = AdapterId(from.word()?);
            let bytes = from.list()?.iter().map(|&byte| u8::try_from(byte));
            let path = bytes.collect::<Result<Vec<_>, _>>().ok();
            let path = path.and_then(|path| String::from_utf8(path).ok());
            let path = path.ok_or_else(|| wrong("the path of an adapter is no text"))?;
            Message::AddAdapter(id, path)
        }
        REMOVE_ADAPTER => Message::RemoveAdapter(AdapterId(from.word()?)),
        STOP => Message::Stop,
        kind => return Err(wrong(&format!("found a message of kind {kind}"))),
    };
    match from.0.len() {
        0 => Ok(message),
        more => Err(wrong(&format!("{more} words are left over"))),
    }
}

fn read_step(
    from: &mut Reader<'_>,
    batch: &mut StepBatch,
    wanted: &mut Vec<Readback>,
) -> Result<()> {
    batch.clear();
    wanted.clear();
    batch.tokens.extend_from_slice(from.list()?);
    batch.positions.extend_from_slice(from.list()?);
    batch.query_starts.extend_from_slice(from.list()?);
    batch.kv_lens.extend_from_slice(from.list()?);
    batch.prompt_lens.extend_from_slice(from.list()?);
    for &[some, id] in from.each()? {
        batch.adapters.push(read_option(some, id)?.map(AdapterId));
    }
    let groups = from.count(2)?;
    batch.block_tables.resize_with(groups, Default::default);
    for tables in &mut batch.block_tables {
        let blocks = from.list()?.iter().copied();
        tables.blocks.extend(blocks.map(BlockId));
        tables.starts.extend_from_slice(from.list()?);
    }
    let slots = from.list()?.iter().copied();
    batch.state_slots.extend(slots.map(StateSlot));
    for &[slot, some, other] in from.each()? {
        batch.state_inits.push(StateInit {
            slot: StateSlot(slot),
            from: read_option(some, other)?.map(StateSlot),
        });
    }
    for &[kept, to] in from.each()? {
        batch.state_keeps.push((StateSlot(kept), StateSlot(to)));
    }
    batch.logit_rows.extend_from_slice(from.list()?);
    batch.hidden_rows.extend_from_slice(from.list()?);
    for &[kind, layer, row] in from.each()? {
        let point = match kind {
            0 => AuxHiddenPoint::Layer(layer),
            1 => AuxHiddenPoint::FinalNorm,
            _ => return Err(wrong("a tap is at no place")),
        };
        batch.aux_hidden.push(AuxHiddenState { point, row });
    }
    // Of an image, five numbers and a count at least.
    for _ in 0..from.count(6)? {
        let &[seq, start, end, keys, skipped] = from.array()?;
        let embeddings = from.list()?.iter().map(|&bits| f32::from_bits(bits));
        batch.images.push(ImageRows {
            seq: seq as usize,
            rows: start as usize..end as usize,
            keys: keys as usize,
            embeddings: embeddings.collect(),
            skipped: skipped as usize,
        });
    }
    for &code in from.list()? {
        wanted.push(match code {
            0 => Readback::Nothing,
            1 => Readback::GREEDY,
            2 => Readback::Logits,
            _ => return Err(wrong("a row wants what there is not")),
        });
    }
    check(batch)
}

/// Holds the lists of a step against each other.
fn check(batch: &StepBatch) -> Result<()> {
    let (tokens, seqs) = (batch.tokens.len(), batch.seqs());
    let partition = |starts: &[u32], end: usize| match starts {
        [] => seqs == 0 && end == 0,
        [first, ..] => {
            let last = starts.last().map(|&last| last as usize);
            *first == 0 && starts.is_sorted() && starts.len() == seqs + 1 && last == Some(end)
        }
    };
    let rows = |rows: &[u32]| rows.iter().all(|&row| (row as usize) < tokens);
    let mut tables = batch.block_tables.iter();
    let mut images = batch.images.iter();
    let fits = [
        ("positions", batch.positions.len() == tokens),
        ("sequences", partition(&batch.query_starts, tokens)),
        ("prompts", batch.prompt_lens.len() == seqs),
        ("adapters", batch.adapters.len() == seqs),
        (
            "block tables",
            tables.all(|tables| partition(&tables.starts, tables.blocks.len())),
        ),
        ("rows of logits", rows(&batch.logit_rows)),
        ("rows of hidden states", rows(&batch.hidden_rows)),
        (
            "images",
            images.all(|image| {
                let inside = image.rows.start <= image.rows.end && image.rows.end <= tokens;
                image.seq < seqs && inside
            }),
        ),
    ];
    match fits.iter().find(|(_, fits)| !fits) {
        None => Ok(()),
        Some((what, _)) => Err(wrong(&format!("its {what} do not fit its tokens"))),
    }
}

fn option(value: Option<u32>) -> [u32; 2] {
    [value.is_some().into(), value.unwrap_or(0)]
}

fn read_option(some: u32, value: u32) -> Result<Option<u32>> {
    match some {
        0 => Ok(None),
        1 => Ok(Some(value)),
        _ => Err(wrong("something is neither there nor not there")),
    }
}

fn wrong(reason: &str) -> Error {
    Error::invalid(OP, reason)
}

struct Writer<'a>(&'a mut Vec<u32>);

impl Writer<'_> {
    fn count(&mut self, count: usize) -> Result<()> {
        let count = u32::try_from(count);
        self.0
            .push(count.map_err(|_| wrong("a number does not fit 32 bits"))?);
        Ok(())
    }

    fn list(&mut self, words: &[u32]) -> Result<()> {
        self.count(words.len())?;
        self.0.extend_from_slice(words);
        Ok(())
    }

    fn each<const N: usize>(
        &mut self,
        items: impl ExactSizeIterator<Item = [u32; N]>,
    ) -> Result<()> {
        self.count(items.len())?;
        self.0.extend(items.flatten());
        Ok(())
    }
}

/// The words that were not read yet.
struct Reader<'a>(&'a [u32]);

impl<'a> Reader<'a> {
    fn word(&mut self) -> Result<u32> {
        let &[word] = self.array()?;
        Ok(word)
    }

    fn array<const N: usize>(&mut self) -> Result<&'a [u32; N]> {
        let (array, rest) = self.0.split_first_chunk().ok_or_else(short)?;
        self.0 = rest;
        Ok(array)
    }

    /// A count of things that take `words` each, or more.
    fn count(&mut self, words: usize) -> Result<usize> {
        let count = self.word()? as usize;
        match count <= self.0.len() / words {
            true => Ok(count),
            false => Err(short()),
        }
    }

    fn list(&mut self) -> Result<&'a [u32]> {
        let count = self.count(1)?;
        let (list, rest) = self.0.split_at(count);
        self.0 = rest;
        Ok(list)
    }

    fn each<const N: usize>(&mut self) -> Result<&'a [[u32; N]]> {
        let count = self.count(N)?;
        let (list, rest) = self.0.split_at(count * N);
        self.0 = rest;
        Ok(list.as_chunks().0)
    }
}

fn short() -> Error {
    wrong("it ends before what it says it holds")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use crate::batch::{LogitRows, SeqStep};
    use crate::images::ImageSpan;

    /// A batch with something in every list.
    fn batch() -> StepBatch {
        let mut batch = StepBatch::default();
        let blocks = [BlockId(3), BlockId(1)];
        for (start, adapter) in [(0, None), (5, Some(AdapterId(2)))] {
            let tokens = [7, 8, 9];
            let step = SeqStep {
                tokens: &tokens,
                start,
                prompt_len: start + 3,
                blocks: &blocks,
                logits: LogitRows::Last,
                adapter,
                hidden: false,
            };
            batch.push(step).unwrap();
            batch
                .add_table(1, &[BlockId::RELEASED, BlockId(4)])
                .unwrap();
            batch.add_state(StateSlot(start as u32));
            batch.add_aux_hidden_last(1, LogitRows::Last);
        }
        let image = ImageSpan {
            start: 6,
            tokens: 2,
            embeddings: [0.5, -1.5, 2.0, f32::MIN_POSITIVE].into(),
        };
        batch.add_image(&image).unwrap();
        batch.add_aux_hidden(0, &[AuxHiddenPoint::FinalNorm]);
        batch.hidden_rows.push(1);
        batch.state_inits.push(StateInit {
            slot: StateSlot(5),
            from: Some(StateSlot(6)),
        });
        batch.state_keeps.push((StateSlot(5), StateSlot(8)));
        batch
    }

    fn step() -> Vec<u32> {
        let mut words = vec![99];
        write_step(&batch(), &[Readback::SAMPLED, Readback::Logits], &mut words).unwrap();
        words
    }

    #[test]
    fn a_step_arrives_as_it_was_sent() {
        // What was in the batch before is gone.
        let (mut found, mut wanted) = (batch(), vec![Readback::Nothing]);
        let message = read(&step(), &mut found, &mut wanted).unwrap();
        assert_eq!(message, Message::Step);
        assert_eq!(format!("{found:?}"), format!("{:?}", batch()));
        // Rank 0 alone samples.
        assert_eq!(wanted, [Readback::GREEDY, Readback::Logits]);
    }

    #[test]
    fn other_messages_arrive_too() {
        let (mut batch, mut wanted, mut words) = (StepBatch::default(), vec![], vec![]);
        let mut read = |words: &[u32]| read(words, &mut batch, &mut wanted).unwrap();
        write_adapter(AdapterId(3), "/tmp/ä b", &mut words).unwrap();
        assert_eq!(
            read(&words),
            Message::AddAdapter(AdapterId(3), "/tmp/ä b".into())
        );
        write_removal(AdapterId(4), &mut words);
        assert_eq!(read(&words), Message::RemoveAdapter(AdapterId(4)));
        write_stop(&mut words);
        assert_eq!(read(&words), Message::Stop);
    }

    #[test]
    fn what_is_cut_or_longer_is_refused() {
        let (mut batch, mut wanted) = (StepBatch::default(), vec![]);
        let mut words = step();
        for end in 0..words.len() {
            assert!(
                read(&words[..end], &mut batch, &mut wanted).is_err(),
                "{end}"
            );
        }
        words.push(0);
        assert!(read(&words, &mut batch, &mut wanted).is_err());
    }

    /// Whatever a word becomes, the message is refused or gives a batch whose lists fit each other.
    #[test]
    fn wrong_words_do_no_harm() {
        let (mut batch, mut wanted) = (StepBatch::default(), vec![]);
        let (sent, mut refused) = (step(), 0);
        for at in 0..sent.len() {
            for value in [0, 1, 2, 77, 1 << 31, u32::MAX] {
                let mut words = sent.clone();
                words[at] = value;
                match read(&words, &mut batch, &mut wanted) {
                    Ok(_) => check(&batch).unwrap(),
                    Err(_) => refused += 1,
                }
            }
        }
        assert!(refused > sent.len(), "{refused}");
    }

    #[test]
    fn steps_that_groups_do_not_run_are_refused() {
        let mut batch = batch();
        batch.set_last_pending(0);
        let refused = write_step(&batch, &[], &mut vec![]);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })));
    }
}
