//! The prefix cache: which blocks hold the keys and values of which tokens after which tokens.
//!
//! It is a tree. A node is known by its parent (the node before it, or a root for each salt) and by the tokens of
//! one block, and is found by a hash of both. The hash is keyed by a secret of the process, so
//! that nobody can prepare prompts that collide; and as tokens and parent are compared too, a collision
//! would only be a miss. By induction a match means that the whole prefix is the same.
//!
//! A node may have a block in each cache group. It is there for as long as it has one, or another node continues it,
//! or a sequence ends with it: blocks of a group with a window are given back before those that come after them.

use ferrum_types::{AdapterId, BlockId, TokenId};
use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::hash::BuildHasher;
use std::sync::Arc;

/// Whatever keys and values depend on beside the tokens, and whoever may not know of each other's.
/// Only sequences with equal salts share blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheSalt {
    /// Tenants do not share: the time of a hit would tell one of another's prompts.
    pub tenant: Option<Arc<str>>,
    /// Length of the prompt, for models whose keys depend on it (length-dependent RoPE).
    pub prompt_len: Option<usize>,
    /// The LoRA adapter that runs beside the weights.
    pub adapter: Option<AdapterId>,
    /// Number of a request that shares with nobody else.
    pub private: Option<u64>,
}

/// A node of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NodeId(u32);

/// What a node continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Parent {
    /// Nothing: it is the first of a sequence.
    Root(CacheSalt),
    /// Another node, which stays for longer than this one.
    Node(NodeId),
}

#[derive(Debug)]
pub(super) struct Node {
    hash: u64,
    pub(super) parent: Parent,
    tokens: Box<[TokenId]>,
    /// Blocks that it has, nodes that continue it, and sequences that end with it.
    users: u32,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct PrefixCache<S> {
    hasher: S,
    groups: usize,
    by_hash: HashMap<u64, NodeId>,
    nodes: Vec<Option<Node>>,
    /// Places in `nodes` without a node.
    vacant: Vec<NodeId>,
    /// `[nodes, groups]`: the block of each.
    blocks: Vec<Option<BlockId>>,
}

impl<S: BuildHasher> PrefixCache<S> {
    pub(super) fn new(groups: usize, hasher: S) -> Self {
        Self {
            hasher,
            groups,
            by_hash: HashMap::new(),
            nodes: Vec::new(),
            vacant: Vec::new(),
            blocks: Vec::new(),
        }
    }

    /// Nodes.
    pub(super) fn len(&self) -> usize {
        self.by_hash.len()
    }

    pub(super) fn node(&self, node: NodeId) -> Option<&Node> {
        self.nodes.get(node.0 as usize)?.as_ref()
    }

    /// The block of a node in a group.
    pub(super) fn block(&self, node: NodeId, group: usize) -> Option<BlockId> {
        self.blocks[node.0 as usize * self.groups + group]
    }

    /// Gives a node a block in a group, where it has none.
    pub(super) fn put_block(&mut self, node: NodeId, group: usize, block: BlockId) {
        self.blocks[node.0 as usize * self.groups + group] = Some(block);
        self.hold(node);
    }

    /// Takes the block of a node in a group away, and the node with the last of what it has.
    pub(super) fn take_block(&mut self, node: NodeId, group: usize) -> Option<BlockId> {
        let block = self.blocks[node.0 as usize * self.groups + group].take()?;
        self.let_go(node);
        Some(block)
    }

    /// The salt and all tokens of the prefix that ends with a node.
    pub(super) fn prefix(&self, node: NodeId) -> (CacheSalt, Vec<TokenId>) {
        let (mut parts, mut at) = (Vec::new(), node);
        let salt = loop {
            let Some(node) = self.node(at) else {
                break CacheSalt::default();
            };
            parts.push(&*node.tokens);
            match &node.parent {
                Parent::Root(salt) => break salt.clone(),
                Parent::Node(before) => at = *before,
            }
        };
        parts.reverse();
        (salt, parts.concat())
    }

    /// The node that holds `tokens` after `parent`.
    pub(super) fn find(&self, parent: &Parent, tokens: &[TokenId]) -> Option<NodeId> {
        let found = *self.by_hash.get(&self.hash(parent, tokens))?;
        self.holds(found, parent, tokens).then_some(found)
    }

    /// The node of `tokens` after `parent`, made where there is none; `None` when something else has its hash. A new
    /// one has to be held, or be given a block.
    pub(super) fn insert(&mut self, parent: Parent, tokens: &[TokenId]) -> Option<NodeId> {
        let hash = self.hash(&parent, tokens);
        if let Some(&found) = self.by_hash.get(&hash) {
            return self.holds(found, &parent, tokens).then_some(found);
        }
        if let Parent::Node(parent) = parent {
            self.hold(parent);
        }
        let node = self.vacant.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            self.blocks.resize(self.blocks.len() + self.groups, None);
            NodeId(self.nodes.len() as u32 - 1)
        });
        self.by_hash.insert(hash, node);
        self.nodes[node.0 as usize] = Some(Node {
            hash,
            parent,
            tokens: tokens.into(),
            users: 0,
        });
        Some(node)
    }

    /// Counts a user of a node.
    pub(super) fn hold(&mut self, node: NodeId) {
        if let Some(node) = &mut self.nodes[node.0 as usize] {
            node.users += 1;
        }
    }

    /// A user less. Without any, the node goes, and its parent has a user less.
    pub(super) fn let_go(&mut self, node: NodeId) {
        let mut at = Some(node);
        while let Some(id) = at.take() {
            let place = &mut self.nodes[id.0 as usize];
            let Some(node) = place else {
                return;
            };
            node.users = node.users.saturating_sub(1);
            if node.users > 0 {
                return;
            }
            if let Some(node) = place.take() {
                if let Slot::Occupied(slot) = self.by_hash.entry(node.hash)
                    && *slot.get() == id
                {
                    slot.remove();
                }
                self.vacant.push(id);
                at = match node.parent {
                    Parent::Node(parent) => Some(parent),
                    Parent::Root(_) => None,
                };
            }
        }
    }

    /// All nodes.
    pub(super) fn ids(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        let nodes = self.nodes.iter().zip(0..);
        nodes.filter_map(|(node, id)| Some((NodeId(id), node.as_ref()?)))
    }

    /// Whether looking for what a node holds leads to it.
    pub(super) fn finds_itself(&self, id: NodeId) -> bool {
        self.node(id)
            .is_some_and(|node| self.find(&node.parent, &node.tokens) == Some(id))
    }

    fn holds(&self, node: NodeId, parent: &Parent, tokens: &[TokenId]) -> bool {
        self.node(node)
            .is_some_and(|n| *n.tokens == *tokens && n.parent == *parent)
    }

    fn hash(&self, parent: &Parent, tokens: &[TokenId]) -> u64 {
        let before = match parent {
            Parent::Root(salt) => self.hasher.hash_one(salt),
            Parent::Node(node) => self.node(*node).map_or(0, |n| n.hash),
        };
        self.hasher.hash_one((before, tokens))
    }
}

impl Node {
    /// Whether it has as many users as were counted.
    pub(super) fn has_users(&self, counted: u32) -> bool {
        self.users == counted
    }

    /// The node that it continues.
    pub(super) fn before(&self) -> Option<NodeId> {
        match self.parent {
            Parent::Node(node) => Some(node),
            Parent::Root(_) => None,
        }
    }
}

impl NodeId {
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}
