//! The prefix cache: a tree of token blocks and the KV blocks that hold them.
//!
//! A node is identified by its parent (the node before it, or a root for each salt) and by the tokens of
//! one block, and is found by a hash of both. The hash is keyed by a secret of the process, so
//! that prompts that collide cannot be prepared; and as tokens and parent are compared too, a collision
//! would only be a miss. By induction a match means that the whole prefix is the same.
//!
//! A node may have a block in each cache group. It exists while it has one, or another node continues it, or a sequence
//! ends with it: blocks of a group with a window are released before the blocks after them.

use ferrum_types::{AdapterId, BlockId, TokenId};
use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::hash::BuildHasher;
use std::sync::Arc;

/// Everything besides tokens that isolates prefix-cache entries. Only sequences with equal salts share blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheSalt {
    /// Tenants do not share: the timing of a hit would reveal another tenant's prompts.
    pub tenant: Option<Arc<str>>,
    /// Length of the prompt, for models whose keys depend on it (length-dependent RoPE).
    pub prompt_len: Option<usize>,
    /// The LoRA adapter of the sequence.
    pub adapter: Option<AdapterId>,
    /// Number of a request that shares with no other request.
    pub private: Option<u64>,
}

/// A node of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NodeId(u32);

/// The parent of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Parent {
    /// None: the node is the first of a sequence.
    Root(CacheSalt),
    /// Another node, which outlives this one.
    Node(NodeId),
}

#[derive(Debug)]
pub(super) struct Node {
    hash: u64,
    pub(super) parent: Parent,
    tokens: Box<[TokenId]>,
    /// Reference count: its blocks, nodes that continue it, and sequences that end with it.
    users: u32,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct PrefixCache<S> {
    hasher: S,
    groups: usize,
    by_hash: HashMap<u64, NodeId>,
    nodes: Vec<Option<Node>>,
    /// Free indices of `nodes`.
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

    /// Number of nodes.
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

    /// Sets the block of a node in a group where it has none.
    pub(super) fn put_block(&mut self, node: NodeId, group: usize, block: BlockId) {
        self.blocks[node.0 as usize * self.groups + group] = Some(block);
        self.hold(node);
    }

    /// Removes the block of a node in a group, and the node itself with its last user.
    pub(super) fn take_block(&mut self, node: NodeId, group: usize) -> Option<BlockId> {
        let block = self.blocks[node.0 as usize * self.groups + group].take()?;
        self.unhold(node);
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

    /// The node of `tokens` after `parent`, created if there is none; `None` on a hash collision. A new node must be held
    /// or get a block.
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

    /// Adds a user of a node.
    pub(super) fn hold(&mut self, node: NodeId) {
        if let Some(node) = &mut self.nodes[node.0 as usize] {
            node.users += 1;
        }
    }

    /// Removes a user of a node. A node without users is removed, and with it a user of its parent.
    pub(super) fn unhold(&mut self, node: NodeId) {
        let mut at = Some(node);
        while let Some(id) = at.take() {
            let entry = &mut self.nodes[id.0 as usize];
            let Some(node) = entry else {
                return;
            };
            node.users = node.users.saturating_sub(1);
            if node.users > 0 {
                return;
            }
            if let Some(node) = entry.take() {
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

    /// Whether a lookup of a node's tokens finds the node.
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
    /// Whether its reference count equals `counted`.
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
