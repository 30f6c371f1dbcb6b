//! Slots of recurrent states: those of running sequences, and state checkpoints.
//!
//! A recurrent state is that of all tokens up to some position. So a prefix can be reused only up to a state checkpoint: a
//! copy of the state at the end of a block, in a slot of its own. It belongs to the node of that block and is dropped when
//! the block leaves the prefix cache, or when its slot is needed and it is the least recently used one.
//!
//! For the same reason a step with a draft begins with a copy of the sequence's state, in a slot that the sequence has for
//! this step: if the draft is wrong, that is its state again.

use super::lru::LruList;
use super::prefix::NodeId;
use ferrum_models::StateSlots;
use ferrum_types::StateSlot;
use std::collections::HashMap;

/// What a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotUse {
    Free,
    /// It is the state of a running sequence, or that from before its draft.
    Working,
    /// A step in flight copies a state to it.
    Filling,
    /// It is the checkpoint after a prefix.
    Checkpoint(NodeId),
}

/// The slots of a runner.
#[derive(Debug)]
pub(super) struct StatePool {
    /// Most checkpoints.
    max_checkpoints: usize,
    slots: Vec<SlotUse>,
    free: Vec<StateSlot>,
    by_node: HashMap<NodeId, StateSlot>,
    /// Checkpoints by their last use.
    checkpoints: LruList,
    filling: usize,
    /// Checkpoints that were dropped since the last [`take_forgotten`](Self::take_forgotten).
    forgotten: Vec<(NodeId, StateSlot)>,
}

impl StatePool {
    pub(super) fn new(slots: StateSlots) -> Self {
        let count = slots.count().min(i32::MAX as usize);
        Self {
            max_checkpoints: slots.kept,
            slots: vec![SlotUse::Free; count],
            free: (0..count as u32).rev().map(StateSlot).collect(),
            by_node: HashMap::new(),
            checkpoints: LruList::new(count),
            filling: 0,
            forgotten: Vec::new(),
        }
    }

    /// The checkpoint after a prefix.
    pub(super) fn of_node(&self, node: NodeId) -> Option<StateSlot> {
        self.by_node.get(&node).copied()
    }

    /// Number of checkpoints.
    pub(super) fn checkpoints(&self) -> usize {
        self.checkpoints.len()
    }

    /// Marks a checkpoint as used.
    pub(super) fn touch(&mut self, slot: StateSlot) {
        if self.checkpoints.contains(slot.0) {
            self.checkpoints.remove(slot.0);
            self.checkpoints.push_newest(slot.0);
        }
    }

    /// A slot for a sequence; that of the least recently used checkpoint, if none is free.
    pub(super) fn take_working(&mut self) -> Option<StateSlot> {
        if self.free.is_empty() {
            self.forget_oldest();
        }
        self.take(SlotUse::Working)
    }

    /// A slot for a copy of a sequence's state, for one step. Such copies leave half of the checkpoints alone.
    pub(super) fn take_saved(&mut self) -> Option<StateSlot> {
        if self.free.is_empty() && self.checkpoints.len() > self.max_checkpoints / 2 {
            self.forget_oldest();
        }
        self.take(SlotUse::Working)
    }

    /// A slot for a new checkpoint, if there may be another.
    pub(super) fn take_filling(&mut self) -> Option<StateSlot> {
        let all = self.checkpoints.len() + self.filling >= self.max_checkpoints;
        if all || self.free.is_empty() {
            self.forget_oldest();
        }
        if self.checkpoints.len() + self.filling >= self.max_checkpoints {
            return None;
        }
        let slot = self.take(SlotUse::Filling)?;
        self.filling += 1;
        Some(slot)
    }

    fn take(&mut self, now: SlotUse) -> Option<StateSlot> {
        let slot = self.free.pop()?;
        self.slots[slot.0 as usize] = now;
        Some(slot)
    }

    /// Makes the state in a slot the checkpoint after a prefix, unless the prefix has one.
    pub(super) fn commit(&mut self, slot: StateSlot, node: NodeId) {
        match self.of_node(node) {
            Some(known) => {
                self.touch(known);
                self.release(slot);
            }
            None => {
                self.filling -= 1;
                self.slots[slot.0 as usize] = SlotUse::Checkpoint(node);
                self.by_node.insert(node, slot);
                self.checkpoints.push_newest(slot.0);
            }
        }
    }

    /// Releases the slot of a sequence, or of a checkpoint that is not needed.
    pub(super) fn release(&mut self, slot: StateSlot) {
        let before = std::mem::replace(&mut self.slots[slot.0 as usize], SlotUse::Free);
        self.filling -= usize::from(before == SlotUse::Filling);
        self.free.push(slot);
    }

    /// Drops the checkpoint after a prefix.
    pub(super) fn forget(&mut self, node: NodeId) {
        if let Some(slot) = self.by_node.remove(&node) {
            self.checkpoints.remove(slot.0);
            self.forgotten.push((node, slot));
            self.release(slot);
        }
    }

    fn forget_oldest(&mut self) {
        let oldest = self.checkpoints.iter().next();
        if let Some(oldest) = oldest
            && let SlotUse::Checkpoint(node) = self.slots[oldest as usize]
        {
            self.forget(node);
        }
    }

    /// The checkpoints that were dropped since the last call. Their slots still hold the states.
    pub(super) fn take_forgotten(&mut self) -> Vec<(NodeId, StateSlot)> {
        std::mem::take(&mut self.forgotten)
    }

    /// The checkpoints, most recently used first.
    pub(super) fn by_last_use(&self) -> Vec<(NodeId, StateSlot)> {
        let slots = self.checkpoints.iter();
        let kept = slots.filter_map(|slot| match self.slots[slot as usize] {
            SlotUse::Checkpoint(node) => Some((node, StateSlot(slot))),
            _ => None,
        });
        let mut kept: Vec<_> = kept.collect();
        kept.reverse();
        kept
    }

    /// Checks that every slot is in one list, given the slots of sequences and which nodes may have a checkpoint.
    pub(super) fn check(
        &self,
        working: &[StateSlot],
        has_block: impl Fn(NodeId) -> bool,
    ) -> Result<(), String> {
        let mut counted = vec![0; self.slots.len()];
        let listed = self.free.iter().chain(working);
        for slot in listed.chain(self.by_node.values()) {
            counted[slot.0 as usize] += 1;
        }
        for (index, (slot, counted)) in self.slots.iter().zip(counted).enumerate() {
            let id = StateSlot(index as u32);
            let fits = match slot {
                SlotUse::Free => self.free.contains(&id),
                SlotUse::Working => working.contains(&id),
                SlotUse::Filling => true,
                SlotUse::Checkpoint(node) => self.of_node(*node) == Some(id) && has_block(*node),
            };
            let expected = usize::from(*slot != SlotUse::Filling);
            let kept = matches!(slot, SlotUse::Checkpoint(_));
            if !fits || counted != expected || self.checkpoints.contains(id.0) != kept {
                return Err(format!("state slot {index} is lost or in the wrong list"));
            }
        }
        let filling = self.slots.iter().filter(|s| **s == SlotUse::Filling);
        if filling.count() != self.filling
            || self.checkpoints.len() + self.filling > self.max_checkpoints
        {
            return Err("more states are kept than may be".into());
        }
        Ok(())
    }
}
