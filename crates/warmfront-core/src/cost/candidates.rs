//! Which replicas must be looked at, given what they cost at least.
//!
//! The caller looks at some, says what they really cost, and asks again until nobody is left who could still be among the
//! best. Where bounds are the costs, the first answer holds all that is needed.

use super::Bound;

/// A replica that may be chosen.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub slot: u32,
    /// Number of the last request that went there; of equals, the one unused for longest comes first.
    pub last_used: u64,
    /// Part of its KV memory in use, by which those that cost nearly the same are told apart.
    pub used: f64,
    pub bound: Bound,
    /// The bound is the cost.
    pub is_settled: bool,
}

/// Total, slot: the order in which choices are tried.
type Rank = (f64, u32);
/// Cost by another rule, last use, slot: the order of the one that rule would choose.
type RuleRank = (f64, u64, u32);

impl Candidate {
    fn rank(&self) -> Rank {
        (self.bound.total_s, self.slot)
    }

    fn by_trust(&self) -> RuleRank {
        (self.bound.trusting_s, self.last_used, self.slot)
    }

    fn by_load(&self) -> RuleRank {
        (self.bound.blind_s, self.last_used, self.slot)
    }
}

/// The replicas of one decision.
#[derive(Debug, Default)]
pub struct Candidates {
    rows: Vec<Candidate>,
}

impl Candidates {
    pub fn new(rows: Vec<Candidate>) -> Self {
        Self { rows }
    }

    /// All of them, in the order given.
    pub fn rows(&self) -> &[Candidate] {
        &self.rows
    }

    /// The slots that look best: `count` of them by total, one with full credit, one by load alone.
    pub fn first(&self, count: usize) -> Vec<u32> {
        let mut slots: Vec<u32> = leading(self.rows.iter(), count).iter().map(|row| row.slot).collect();
        for rule in [Candidate::by_trust, Candidate::by_load] {
            slots.extend(least(self.rows.iter(), rule).map(|row| row.slot));
        }
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    /// The slots not settled yet that may still be among the best, as what is settled stands; none before anything is.
    pub fn rest(&self, count: usize) -> Vec<u32> {
        let settled = || self.rows.iter().filter(|row| row.is_settled);
        let best = leading(settled(), count);
        let (Some(last), Some(by_trust), Some(by_load)) =
            (best.last(), least(settled(), Candidate::by_trust), least(settled(), Candidate::by_load))
        else {
            return Vec::new();
        };
        let (last, by_trust, by_load) = (last.rank(), by_trust.by_trust(), by_load.by_load());
        let may_win = |row: &&Candidate| row.rank() < last || row.by_trust() < by_trust || row.by_load() < by_load;
        self.rows.iter().filter(|row| !row.is_settled).filter(may_win).map(|row| row.slot).collect()
    }

    /// Says what a replica really costs.
    pub fn settle(&mut self, slot: u32, total_s: f64, trusting_s: f64, blind_s: f64) {
        if let Some(row) = self.rows.iter_mut().find(|row| row.slot == slot) {
            row.bound = Bound { total_s, trusting_s, blind_s, ..row.bound };
            row.is_settled = true;
        }
    }

    /// Of those that cost nearly the same as the cheapest, the one with the most free memory, if it is not settled yet.
    ///
    /// `tie_s`: costs this close are equal. `prefer`: tells apart those with equal memory; more is better.
    pub fn favourite<E>(
        &self,
        tie_s: f64,
        mut prefer: impl FnMut(&Candidate) -> Result<u64, E>,
    ) -> Result<Option<u32>, E> {
        let Some(cheapest) = least(self.rows.iter(), Candidate::rank) else { return Ok(None) };
        let limit_s = cheapest.bound.total_s + tie_s;
        let tied = || self.rows.iter().filter(|row| row.bound.total_s <= limit_s);
        let used = tied().map(|row| row.used).fold(f64::INFINITY, f64::min);
        let mut emptiest = tied().filter(|row| row.used <= used);
        let Some(mut best) = emptiest.next() else { return Ok(None) };
        let mut best_preference = None;
        for row in emptiest {
            let known = match best_preference {
                Some(known) => known,
                None => prefer(best)?,
            };
            let preference = prefer(row)?;
            let wins = preference > known || (preference == known && row.rank() < best.rank());
            best_preference = Some(if wins { preference } else { known });
            if wins {
                best = row;
            }
        }
        Ok((!best.is_settled).then_some(best.slot))
    }
}

/// The first `count` rows by rank, in order.
fn leading<'a>(rows: impl Iterator<Item = &'a Candidate>, count: usize) -> Vec<&'a Candidate> {
    let mut best: Vec<&Candidate> = Vec::with_capacity(count + 1);
    for row in rows {
        if best.len() == count && best.last().is_none_or(|last| row.rank() >= last.rank()) {
            continue;
        }
        best.insert(best.partition_point(|other| other.rank() < row.rank()), row);
        best.truncate(count);
    }
    best
}

fn least<'a, K: PartialOrd>(
    rows: impl Iterator<Item = &'a Candidate>,
    key: impl Fn(&Candidate) -> K,
) -> Option<&'a Candidate> {
    rows.reduce(|best, row| if key(row) < key(best) { row } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(rows: &[(f64, f64, f64)]) -> Candidates {
        let row = |(slot, &(total_s, blind_s, used)): (usize, &(f64, f64, f64))| Candidate {
            slot: 10 + slot as u32,
            last_used: 0,
            used,
            bound: Bound { total_s, trusting_s: total_s, blind_s, seen_s: 0.0 },
            is_settled: false,
        };
        Candidates::new(rows.iter().enumerate().map(row).collect())
    }

    fn settle(candidates: &mut Candidates, slots: &[u32], more_s: f64) {
        for &slot in slots {
            let bound = candidates.rows().iter().find(|row| row.slot == slot).unwrap().bound;
            candidates.settle(slot, bound.total_s + more_s, bound.trusting_s + more_s, bound.blind_s + more_s);
        }
    }

    fn favourite(candidates: &Candidates, prefer: impl Fn(&Candidate) -> u64) -> Option<u32> {
        candidates.favourite(1e-3, |row| Ok::<_, ()>(prefer(row))).unwrap()
    }

    #[test]
    fn the_best_by_every_rule_come_first_and_of_equals_the_lower_slot() {
        let mut candidates = candidates(&[(3.0, 9.0, 0.0), (2.0, 5.0, 0.0), (1.0, 7.0, 0.0), (2.0, 4.0, 0.0)]);
        assert_eq!(candidates.first(2), [11, 12, 13]);
        candidates.rows[3].last_used = 5;
        candidates.rows[1].bound.blind_s = 4.0;
        assert_eq!(candidates.first(2), [11, 12], "of equals by load alone, the one unused for longest");
    }

    #[test]
    fn where_bounds_are_the_costs_nobody_else_need_be_looked_at() {
        let mut candidates = candidates(&[(1.0, 1.0, 0.0); 100]);
        let first = candidates.first(3);
        assert_eq!(first, [10, 11, 12]);
        settle(&mut candidates, &first, 0.0);
        assert!(candidates.rest(3).is_empty());
    }

    #[test]
    fn who_may_still_be_cheaper_than_what_was_seen_is_looked_at() {
        let mut candidates = candidates(&[(1.0, 1.0, 0.0), (1.2, 2.0, 0.0), (1.3, 2.0, 0.0), (9.0, 1.1, 0.0)]);
        assert!(candidates.rest(1).is_empty());
        let first = candidates.first(1);
        settle(&mut candidates, &first, 0.25);
        assert_eq!(candidates.rest(1), [11, 13]);
        settle(&mut candidates, &[11, 13], 0.25);
        assert!(candidates.rest(1).is_empty());
    }

    #[test]
    fn the_emptiest_of_those_that_cost_nearly_the_same_is_looked_at_until_it_is_one_of_them() {
        let mut candidates = candidates(&[(1.0, 1.0, 0.5), (1.0005, 1.0, 0.25), (1.0005, 1.0, 0.25), (2.0, 1.0, 0.0)]);
        settle(&mut candidates, &[10], 0.0);
        assert_eq!(favourite(&candidates, |_| 0), Some(11));
        assert_eq!(favourite(&candidates, |row| row.slot.into()), Some(12));
        settle(&mut candidates, &[12], 1.0);
        assert_eq!(favourite(&candidates, |row| row.slot.into()), Some(11));
        settle(&mut candidates, &[11], 0.0);
        assert_eq!(favourite(&candidates, |row| row.slot.into()), None);
    }
}
