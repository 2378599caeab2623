//! What is kept of one slot when its router restarts: a plain value and its bytes.
//!
//! Only hashes, counts and ages: no tokens, no prompts. Blocks are listed once and everything else names them by row.
//! Numbers are little-endian; a list is its length (u32) and its entries. The reader takes nothing on trust: a length is
//! believed only as far as there are bytes, and a row only when there is such a block, so that what comes out may be
//! put into an index. The layout is documented in `docs/reference/snapshot-format.md`.

/// Of a block: on the device by prediction.
pub(super) const PREDICTED: u8 = 1;

/// Of the slot: the number of its main group is known.
const HAS_MAIN: u8 = 1;
/// Of the slot: some events were lost.
const DOUBTFUL: u8 = 2;

/// One block that the slot has some fact about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockRow {
    pub(super) seq: u64,
    pub(super) flags: u8,
}

/// An engine hash under which a block is confirmed on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceRow {
    pub(super) block: u32,
    pub(super) hash: u64,
    /// Physical copies beyond the first.
    pub(super) copies: u32,
}

/// An engine hash under which a block lies on slower tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TierRow {
    pub(super) block: u32,
    pub(super) hash: u64,
    pub(super) host: u32,
    pub(super) disk: u32,
}

/// A cache group other than the main one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GroupRow {
    pub(super) number: u32,
    /// 0: all blocks; 1: nothing; otherwise this many tokens and one.
    pub(super) need: u32,
    pub(super) block_size: u32,
    /// Engine hashes and their copies.
    pub(super) members: Vec<(u64, u32)>,
}

/// A prompt that was dispatched: runs of rows of blocks, from the first block on.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PromptRow {
    pub(super) age_s: f64,
    /// First row and blocks of each run.
    pub(super) runs: Vec<(u32, u32)>,
}

/// Everything that is kept of one slot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SlotRecord {
    pub(super) blocks: Vec<BlockRow>,
    /// Ascending by block.
    pub(super) device: Vec<DeviceRow>,
    /// Ascending by block.
    pub(super) tiers: Vec<TierRow>,
    /// Some events were lost; no copies are counted then.
    pub(super) is_doubtful: bool,
    pub(super) main_group: Option<u32>,
    pub(super) groups: Vec<GroupRow>,
    pub(super) prompts: Vec<PromptRow>,
    /// Sequence hashes and the seconds since a prompt that ends there was dispatched.
    pub(super) ages: Vec<(u64, f64)>,
}

impl SlotRecord {
    /// Facts: pairs of this slot and a block or an engine hash.
    pub fn facts(&self) -> usize {
        let predicted = self.blocks.iter().filter(|block| block.flags & PREDICTED != 0).count();
        self.device.len() + self.tiers.len() + predicted
    }

    /// Without what events have told: what remains when the engine's stream cannot be picked up.
    #[must_use]
    pub fn without_confirmed(self) -> Self {
        Self { device: vec![], tiers: vec![], groups: vec![], main_group: None, is_doubtful: false, ..self }
    }

    /// With prompts that are at least so old, so that their predictions end sooner.
    #[must_use]
    pub fn aged(mut self, age_min_s: f64) -> Self {
        for prompt in &mut self.prompts {
            prompt.age_s = prompt.age_s.max(age_min_s);
        }
        self
    }

    fn flags(&self) -> u8 {
        let main = if self.main_group.is_some() { HAS_MAIN } else { 0 };
        let doubt = if self.is_doubtful { DOUBTFUL } else { 0 };
        main | doubt
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Out(Vec::with_capacity(64 + self.blocks.len() * 9 + self.device.len() * 16));
        out.list(&self.blocks, |out, block| {
            out.u64(block.seq).u8(block.flags);
        });
        out.list(&self.device, |out, row| {
            out.u32(row.block).u64(row.hash).u32(row.copies);
        });
        out.list(&self.tiers, |out, row| {
            out.u32(row.block).u64(row.hash).u32(row.host).u32(row.disk);
        });
        out.u8(self.flags()).u32(self.main_group.unwrap_or(0));
        out.list(&self.groups, |out, group| {
            out.u32(group.number).u32(group.need).u32(group.block_size);
            out.list(&group.members, |out, (hash, copies)| {
                out.u64(*hash).u32(*copies);
            });
        });
        out.list(&self.prompts, |out, prompt| {
            out.f64(prompt.age_s);
            out.list(&prompt.runs, |out, (first, blocks)| {
                out.u32(*first).u32(*blocks);
            });
        });
        out.list(&self.ages, |out, (seq, age_s)| {
            out.u64(*seq).f64(*age_s);
        });
        out.0
    }

    /// Reads what [`SlotRecord::encode`] wrote.
    ///
    /// # Errors
    ///
    /// The bytes are no such record; the reason, in words.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut input = In(bytes);
        let blocks = input.list(9, |input| Ok(BlockRow { seq: input.u64()?, flags: input.u8()? }))?;
        let device =
            input.list(16, |input| Ok(DeviceRow { block: input.u32()?, hash: input.u64()?, copies: input.u32()? }))?;
        let tiers = input.list(20, |input| {
            Ok(TierRow { block: input.u32()?, hash: input.u64()?, host: input.u32()?, disk: input.u32()? })
        })?;
        let (flags, number) = (input.u8()?, input.u32()?);
        if flags & !(HAS_MAIN | DOUBTFUL) != 0 {
            return Err("a slot with unknown flags".into());
        }
        let (main_group, is_doubtful) = ((flags & HAS_MAIN != 0).then_some(number), flags & DOUBTFUL != 0);
        let groups = input.list(16, |input| {
            let (number, need, block_size) = (input.u32()?, input.u32()?, input.u32()?);
            let members = input.list(12, |input| Ok((input.u64()?, input.u32()?)))?;
            Ok(GroupRow { number, need, block_size, members })
        })?;
        let prompts = input.list(12, |input| {
            let age_s = input.f64()?;
            Ok(PromptRow { age_s, runs: input.list(8, |input| Ok((input.u32()?, input.u32()?)))? })
        })?;
        let ages = input.list(16, |input| Ok((input.u64()?, input.f64()?)))?;
        if !input.0.is_empty() {
            return Err(format!("{} bytes too many", input.0.len()));
        }
        let record = Self { blocks, device, tiers, is_doubtful, main_group, groups, prompts, ages };
        record.check()?;
        Ok(record)
    }

    /// What no list of bytes guarantees and the index relies on.
    fn check(&self) -> Result<(), String> {
        let blocks = self.blocks.len() as u64;
        if self.blocks.iter().any(|block| block.seq == 0 || block.flags & !PREDICTED != 0) {
            return Err("a block without a hash or with unknown flags".into());
        }
        let rows = self.device.iter().map(|row| row.block).chain(self.tiers.iter().map(|row| row.block));
        if rows.into_iter().any(|row| u64::from(row) >= blocks) {
            return Err("a fact about a block that is not there".into());
        }
        if !self.device.is_sorted_by_key(|row| row.block) || !self.tiers.is_sorted_by_key(|row| row.block) {
            return Err("facts out of order".into());
        }
        if self.is_doubtful && self.device.iter().any(|row| row.copies > 0) {
            return Err("copies are counted although events were lost".into());
        }
        if self.tiers.iter().any(|row| row.host == 0 && row.disk == 0) {
            return Err("a block on no tier".into());
        }
        let members = self.groups.iter().flat_map(|group| &group.members);
        if members.into_iter().any(|(_, copies)| *copies == 0) {
            return Err("a member without a copy".into());
        }
        let ages = self.ages.iter().map(|(_, age_s)| *age_s).chain(self.prompts.iter().map(|prompt| prompt.age_s));
        if ages.into_iter().any(|age_s| !age_s.is_finite() || age_s < 0.0) {
            return Err("an age that is none".into());
        }
        let runs = self.prompts.iter().flat_map(|prompt| &prompt.runs);
        if runs.into_iter().any(|(first, length)| *length == 0 || u64::from(*first) + u64::from(*length) > blocks) {
            return Err("a prompt of blocks that are not there".into());
        }
        if self.prompts.iter().any(|prompt| prompt.runs.is_empty() || prompt.blocks() > blocks) {
            return Err("a prompt without blocks, or with more than there are".into());
        }
        Ok(())
    }
}

impl PromptRow {
    pub(super) fn blocks(&self) -> u64 {
        self.runs.iter().map(|(_, length)| u64::from(*length)).sum()
    }
}

struct Out(Vec<u8>);

impl Out {
    fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn f64(&mut self, value: f64) -> &mut Self {
        self.u64(value.to_bits())
    }

    fn list<T>(&mut self, rows: &[T], mut write: impl FnMut(&mut Self, &T)) {
        self.u32(u32::try_from(rows.len()).expect("an index has fewer than 2^32 blocks"));
        for row in rows {
            write(self, row);
        }
    }
}

struct In<'a>(&'a [u8]);

impl In<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or("it ends too early")?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, String> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.take().map(u64::from_le_bytes)
    }

    fn f64(&mut self) -> Result<f64, String> {
        self.u64().map(f64::from_bits)
    }

    /// A list whose entries take at least `bytes_min` each: no more is reserved than the rest can hold.
    fn list<T>(
        &mut self,
        bytes_min: usize,
        mut read: impl FnMut(&mut Self) -> Result<T, String>,
    ) -> Result<Vec<T>, String> {
        let length = self.u32()? as usize;
        if length > self.0.len() / bytes_min {
            return Err("a list is longer than the bytes that are left".into());
        }
        let mut rows = Vec::with_capacity(length);
        for _ in 0..length {
            rows.push(read(self)?);
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn small() -> SlotRecord {
        SlotRecord {
            blocks: vec![BlockRow { seq: 7, flags: 0 }, BlockRow { seq: 8, flags: PREDICTED }],
            device: vec![DeviceRow { block: 0, hash: 3, copies: 2 }],
            tiers: vec![TierRow { block: 1, hash: 4, host: 0, disk: 1 }],
            is_doubtful: false,
            main_group: Some(1),
            groups: vec![GroupRow { number: 0, need: 9, block_size: 16, members: vec![(3, 1)] }],
            prompts: vec![PromptRow { age_s: 1.5, runs: vec![(0, 2)] }],
            ages: vec![(8, 0.25)],
        }
    }

    #[test]
    fn a_record_comes_back_from_its_bytes() {
        assert_eq!(SlotRecord::decode(&small().encode()), Ok(small()));
        assert_eq!(SlotRecord::decode(&SlotRecord::default().encode()), Ok(SlotRecord::default()));
        let mut doubtful = SlotRecord { is_doubtful: true, main_group: None, ..small() };
        doubtful.device[0].copies = 0;
        assert_eq!(SlotRecord::decode(&doubtful.encode()), Ok(doubtful));
    }

    type Breaks = fn(&mut SlotRecord);

    #[test]
    fn a_record_that_names_what_it_does_not_list_is_refused() {
        let broken: [(&str, Breaks); 9] = [
            ("a fact about a block that is not there", |record| record.device[0].block = 2),
            ("a prompt of blocks that are not there", |record| record.prompts[0].runs[0] = (1, u32::MAX)),
            ("a prompt without blocks, or with more than there are", |record| record.prompts[0].runs.clear()),
            ("an age that is none", |record| record.ages[0].1 = f64::NAN),
            ("a block without a hash or with unknown flags", |record| record.blocks[0].flags = 2),
            ("a block without a hash or with unknown flags", |record| record.blocks[1].seq = 0),
            ("a block on no tier", |record| record.tiers[0].disk = 0),
            ("copies are counted although events were lost", |record| record.is_doubtful = true),
            ("a member without a copy", |record| record.groups[0].members[0].1 = 0),
        ];
        for (reason, breaks) in broken {
            let mut record = small();
            breaks(&mut record);
            assert_eq!(SlotRecord::decode(&record.encode()), Err(reason.to_owned()));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

        #[test]
        fn any_bytes_are_read_or_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _refused_or_not = SlotRecord::decode(&bytes);
        }

        #[test]
        fn a_truncated_or_changed_record_never_panics(cut in 0_usize..400, at in 0_usize..400, bit in 0_u8..8) {
            let mut bytes = small().encode();
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            let _refused_or_not = SlotRecord::decode(&bytes);
            let whole = small().encode();
            if cut < whole.len() {
                prop_assert!(SlotRecord::decode(&whole[..cut]).is_err());
            }
        }
    }
}
