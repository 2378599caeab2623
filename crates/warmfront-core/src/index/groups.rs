//! Cache groups of one replica (hybrid models).
//!
//! One group of full attention, the *main* group, carries the chain of blocks. Every other group is a set of engine
//! hashes: it never teaches tokens, since its stores may be sparse. A prefix is usable up to a length at which each such
//! group still has what it needs: the window before it, the state at it, or everything.

use super::hash::FastMap;
use crate::kv::wire::{EngineHash, SpecKind, Stored};

/// Cache groups of a replica that are remembered; real models have fewer than ten.
const GROUPS_MAX: usize = 64;

/// What a group other than the main one asks of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// All blocks.
    All,
    /// This many tokens before the end.
    Tokens(u32),
    /// Nothing.
    Nothing,
}

impl Need {
    /// As a number: 0 for all, 1 for nothing, otherwise the tokens and one.
    pub(super) fn code(self) -> u32 {
        match self {
            Self::All => 0,
            Self::Nothing | Self::Tokens(0) => 1,
            Self::Tokens(tokens) => tokens.saturating_add(1),
        }
    }

    pub(super) fn of_code(code: u32) -> Self {
        match code {
            0 => Self::All,
            1 => Self::Nothing,
            code => Self::Tokens(code - 1),
        }
    }
}

#[derive(Debug)]
pub(super) struct Group {
    pub(super) number: u32,
    pub(super) need: Need,
    /// Tokens; zero until a store says.
    pub(super) block_size: u32,
    /// Physical copies by engine hash.
    members: FastMap<u64, u32>,
}

impl Group {
    /// Engine hashes and their copies, in no order that means anything.
    pub(super) fn members(&self) -> impl Iterator<Item = (u64, u32)> {
        self.members.iter().map(|(hash, copies)| (*hash, *copies))
    }

    pub(super) fn has(&self, hash: u64) -> bool {
        self.members.contains_key(&hash)
    }
}

/// Where the blocks of a group belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Main,
    /// Row in `Groups::others`.
    Other(usize),
    /// More groups than any model has.
    Nowhere,
}

#[derive(Debug, Default)]
pub(super) struct Groups {
    main: Option<u32>,
    others: Vec<Group>,
}

impl Groups {
    /// Groups that may shorten a hit.
    pub(super) fn others(&self) -> &[Group] {
        &self.others
    }

    /// The group that carries the chain, once a store has said so.
    pub(super) fn main(&self) -> Option<u32> {
        self.main
    }

    /// Starts over with a main group that a former process learned.
    pub(super) fn restore(&mut self, main: Option<u32>) {
        *self = Self { main, others: Vec::new() };
    }

    /// Adds a group that a former process learned; what is beyond the bound is left out.
    pub(super) fn restore_other(&mut self, number: u32, need: Need, block_size: u32, members: Vec<(u64, u32)>) {
        if self.others.len() < GROUPS_MAX && self.main != Some(number) {
            self.others.push(Group { number, need, block_size, members: members.into_iter().collect() });
        }
    }

    /// Where a removal or an event of another tier belongs. Events without a group speak of the main one.
    pub(super) fn place(&self, group: Option<u32>) -> Place {
        let Some(number) = group else { return Place::Main };
        let untaught = self.main.is_none() && self.others.is_empty();
        if untaught || self.main == Some(number) {
            return Place::Main;
        }
        self.others.iter().position(|other| other.number == number).map_or(Place::Nowhere, Place::Other)
    }

    /// Where a store on the device belongs; learns the roles of groups.
    pub(super) fn learn(&mut self, stored: &Stored) -> Place {
        let number = stored.group.unwrap_or(self.main.unwrap_or(0));
        if self.main == Some(number) {
            return Place::Main;
        }
        let kind = stored.kind.unwrap_or(SpecKind::Unknown);
        if let Some(row) = self.others.iter().position(|other| other.number == number) {
            self.others[row].block_size = stored.block_size;
            return Place::Other(row);
        }
        if self.main.is_none() && matches!(kind, SpecKind::Full | SpecKind::Unknown) {
            self.main = Some(number);
            return Place::Main;
        }
        if self.others.len() == GROUPS_MAX {
            return Place::Nowhere;
        }
        let need = match kind {
            SpecKind::Full => Need::All,
            // A key position sees itself and the `window - 1` tokens before it.
            SpecKind::Window => match stored.window {
                Some(window) if window > 1 => Need::Tokens(window - 1),
                _ => Need::Nothing,
            },
            SpecKind::Mamba => Need::Tokens(1),
            SpecKind::Other | SpecKind::Unknown => Need::Nothing,
        };
        self.others.push(Group { number, need, block_size: stored.block_size, members: FastMap::default() });
        Place::Other(self.others.len() - 1)
    }

    pub(super) fn store(&mut self, row: usize, hashes: &[EngineHash]) {
        for hash in hashes {
            *self.others[row].members.entry(hash.0).or_insert(0) += 1;
        }
    }

    /// Removes one copy. False when there is none.
    pub(super) fn remove(&mut self, row: usize, hash: EngineHash) -> bool {
        let members = &mut self.others[row].members;
        let Some(copies) = members.get_mut(&hash.0) else { return false };
        *copies -= 1;
        if *copies == 0 {
            members.remove(&hash.0);
        }
        true
    }

    /// Empties every group but keeps what is known of their roles.
    pub(super) fn clear(&mut self) {
        for group in &mut self.others {
            group.members.clear();
        }
    }

    /// Forgets roles too: another process may have other groups.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    pub(super) fn bytes(&self) -> usize {
        self.others.iter().map(|group| group.members.allocation_size()).sum()
    }
}
