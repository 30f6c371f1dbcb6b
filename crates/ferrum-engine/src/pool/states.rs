//! Slots of recurrent states: which sequence works in which, and which states are kept for others.
//!
//! A recurrent state is that of all tokens up to some position, and cannot be had for an earlier one. So a prefix is of
//! use only up to where a state of it was kept: a copy, in a slot of its own, at the end of a block. It belongs to the
//! node of that block and goes when the block leaves the prefix cache, or when its slot is needed and no other was
//! used longer ago.

use super::lru::LruList;
use super::prefix::NodeId;
use ferrum_models::StateSlots;
use ferrum_types::StateSlot;
use std::collections::HashMap;

/// What a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotUse {
    Free,
    /// A sequence works in it.
    Working,
    /// A step in flight copies a state to it.
    Filling,
    /// It holds the state after a prefix.
    Kept(NodeId),
}

/// The slots of a runner.
#[derive(Debug)]
pub(super) struct StatePool {
    /// Most states that are kept.
    most_kept: usize,
    slots: Vec<SlotUse>,
    free: Vec<StateSlot>,
    by_node: HashMap<NodeId, StateSlot>,
    /// Kept states by their last use.
    kept: LruList,
    filling: usize,
    /// Kept states that were given away and that nobody has asked for yet.
    forgotten: Vec<(NodeId, StateSlot)>,
}

impl StatePool {
    pub(super) fn new(slots: StateSlots) -> Self {
        let count = slots.count().min(i32::MAX as usize);
        Self {
            most_kept: slots.kept,
            slots: vec![SlotUse::Free; count],
            free: (0..count as u32).rev().map(StateSlot).collect(),
            by_node: HashMap::new(),
            kept: LruList::new(count),
            filling: 0,
            forgotten: Vec::new(),
        }
    }

    /// The kept state after a prefix.
    pub(super) fn of_node(&self, node: NodeId) -> Option<StateSlot> {
        self.by_node.get(&node).copied()
    }

    /// States that are kept.
    pub(super) fn kept(&self) -> usize {
        self.kept.len()
    }

    /// Marks a kept state as used.
    pub(super) fn touch(&mut self, slot: StateSlot) {
        if self.kept.contains(slot.0) {
            self.kept.remove(slot.0);
            self.kept.push_newest(slot.0);
        }
    }

    /// A slot for a sequence; that of the state which was used longest ago, if none is free.
    pub(super) fn take_working(&mut self) -> Option<StateSlot> {
        if self.free.is_empty() {
            self.forget_oldest();
        }
        self.take(SlotUse::Working)
    }

    /// A slot to copy a state to, if any may be kept.
    pub(super) fn take_filling(&mut self) -> Option<StateSlot> {
        if self.kept.len() + self.filling >= self.most_kept {
            self.forget_oldest();
        }
        if self.kept.len() + self.filling >= self.most_kept {
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

    /// Keeps what was copied to a slot as the state after a prefix, unless that has one.
    pub(super) fn keep(&mut self, slot: StateSlot, node: NodeId) {
        match self.of_node(node) {
            Some(known) => {
                self.touch(known);
                self.release(slot);
            }
            None => {
                self.filling -= 1;
                self.slots[slot.0 as usize] = SlotUse::Kept(node);
                self.by_node.insert(node, slot);
                self.kept.push_newest(slot.0);
            }
        }
    }

    /// Gives a slot back that a sequence worked in, or that a state was copied to for nobody.
    pub(super) fn release(&mut self, slot: StateSlot) {
        let before = std::mem::replace(&mut self.slots[slot.0 as usize], SlotUse::Free);
        self.filling -= usize::from(before == SlotUse::Filling);
        self.free.push(slot);
    }

    /// Forgets the state after a prefix.
    pub(super) fn forget(&mut self, node: NodeId) {
        if let Some(slot) = self.by_node.remove(&node) {
            self.kept.remove(slot.0);
            self.forgotten.push((node, slot));
            self.release(slot);
        }
    }

    fn forget_oldest(&mut self) {
        let oldest = self.kept.iter().next();
        if let Some(oldest) = oldest
            && let SlotUse::Kept(node) = self.slots[oldest as usize]
        {
            self.forget(node);
        }
    }

    /// The states that were forgotten since the last call, with what their slots still hold.
    pub(super) fn take_forgotten(&mut self) -> Vec<(NodeId, StateSlot)> {
        std::mem::take(&mut self.forgotten)
    }

    /// The kept states, those that were used last first.
    pub(super) fn by_last_use(&self) -> Vec<(NodeId, StateSlot)> {
        let slots = self.kept.iter();
        let kept = slots.filter_map(|slot| match self.slots[slot as usize] {
            SlotUse::Kept(node) => Some((node, StateSlot(slot))),
            _ => None,
        });
        let mut kept: Vec<_> = kept.collect();
        kept.reverse();
        kept
    }

    /// Whether every slot is in one place, given those that sequences work in and those that steps in flight fill, and
    /// which nodes may have a state.
    pub(super) fn check(
        &self,
        working: &[StateSlot],
        has_block: impl Fn(NodeId) -> bool,
    ) -> Result<(), String> {
        let mut counted = vec![0; self.slots.len()];
        let places = self.free.iter().chain(working);
        for slot in places.chain(self.by_node.values()) {
            counted[slot.0 as usize] += 1;
        }
        for (index, (slot, counted)) in self.slots.iter().zip(counted).enumerate() {
            let id = StateSlot(index as u32);
            let fits = match slot {
                SlotUse::Free => self.free.contains(&id),
                SlotUse::Working => working.contains(&id),
                SlotUse::Filling => true,
                SlotUse::Kept(node) => self.of_node(*node) == Some(id) && has_block(*node),
            };
            let expected = usize::from(*slot != SlotUse::Filling);
            let kept = matches!(slot, SlotUse::Kept(_));
            if !fits || counted != expected || self.kept.contains(id.0) != kept {
                return Err(format!("state slot {index} is lost or in the wrong list"));
            }
        }
        let filling = self.slots.iter().filter(|s| **s == SlotUse::Filling);
        if filling.count() != self.filling || self.kept.len() + self.filling > self.most_kept {
            return Err("more states are kept than may be".into());
        }
        Ok(())
    }
}
