//! Tokens or bytes → blocks → sequence hashes.
//!
//! A sequence hash names a block *and everything before it*: XXH3-64 over (hash of the block before, digest of the extra
//! keys, the block's tokens). It is ours alone; what an engine calls the same block is opaque and learned from its
//! events. What one would get wrong: the request side and the event side must end at the same hash for the same content,
//! though engines spell the extra keys differently from version to version. Both sides therefore go through
//! [`ExtraDigest`], which keeps only what every spelling carries:
//!
//! * the adapter by its served name (paths and numbers differ between processes),
//! * media identifiers and the cache salt as texts of one class, in order: before 0.19 vLLM writes both as bare strings, so
//!   they cannot be told apart. Offsets of media items are dropped: position follows from the tokens,
//! * digests of prompt embeddings as bytes.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Our hash of a block and all before it. Zero never occurs: the index uses it for "none".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct SeqHash(pub u64);

impl fmt::Display for SeqHash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:016x}", self.0)
    }
}

/// One extra key of a block, as an event carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// Tagged adapter (vLLM 0.31 and later). The path that follows the name is dropped.
    Adapter(String),
    /// A bare string: adapter, salt or media identifier; or a tagged salt.
    Text(String),
    /// A media identifier with the item's offset relative to the block.
    Item(String, i64),
    /// Digest of prompt embeddings.
    Bytes(Vec<u8>),
    /// A number of unknown meaning.
    Int(i64),
}

/// A media item of a prompt: it belongs to every block that it overlaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaItem {
    pub identifier: String,
    /// First token of the item in the prompt.
    pub offset: usize,
    /// Tokens of the item.
    pub length: usize,
}

/// What makes blocks with equal tokens different, from the request's side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockExtras {
    /// Served adapter name; part of every block.
    pub adapter: Option<String>,
    /// `cache_salt`; part of the first block, and through the chain of all.
    pub salt: Option<String>,
    /// In prompt order.
    pub media: Vec<MediaItem>,
}

impl BlockExtras {
    fn is_empty(&self) -> bool {
        self.adapter.is_none() && self.salt.is_none() && self.media.is_empty()
    }

    /// Canonical digest of block `block` that covers tokens `start..end`.
    fn digest(&self, block: usize, start: usize, end: usize, scratch: &mut ExtraDigest) -> u64 {
        scratch.begin();
        if let Some(adapter) = &self.adapter {
            scratch.adapter(adapter);
        }
        for item in &self.media {
            if item.offset < end && item.offset + item.length > start {
                scratch.text(&item.identifier);
            }
        }
        if let (0, Some(salt)) = (block, &self.salt) {
            scratch.text(salt);
        }
        scratch.finish()
    }
}

/// Collects the extra keys of one block in canonical form. Zero means "no extra keys".
#[derive(Debug, Default)]
pub(crate) struct ExtraDigest {
    bytes: Vec<u8>,
}

impl ExtraDigest {
    pub(crate) fn begin(&mut self) {
        self.bytes.clear();
    }

    pub(crate) fn adapter(&mut self, name: &str) {
        self.part(b'a', name.as_bytes());
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.part(b't', text.as_bytes());
    }

    /// Adds one key of an event, whose `lora_name` is `adapter` and has been added already.
    pub(crate) fn key(&mut self, key: &ExtraKey) {
        match key {
            ExtraKey::Adapter(name) => self.adapter(name),
            ExtraKey::Text(text) | ExtraKey::Item(text, _) => self.text(text),
            ExtraKey::Bytes(bytes) => self.part(b'b', bytes),
            ExtraKey::Int(number) => self.part(b'i', &number.to_le_bytes()),
        }
    }

    fn part(&mut self, tag: u8, value: &[u8]) {
        self.bytes.push(tag);
        self.bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
        self.bytes.extend_from_slice(value);
    }

    pub(crate) fn finish(&self) -> u64 {
        if self.bytes.is_empty() { 0 } else { xxh3_64_with_seed(&self.bytes, 0) }
    }
}

/// Digest of an event's extra keys for one block. `lora_name` wins over what the keys say about the adapter, because it
/// is the served name in every version; `lora_id` stands in for it where no name exists (vLLM before 0.14), and then
/// never equals what a request says.
pub(crate) fn event_digest(
    lora_name: Option<&str>,
    lora_id: Option<i64>,
    keys: &[ExtraKey],
    scratch: &mut ExtraDigest,
) -> u64 {
    scratch.begin();
    let mut adapter_seen = false;
    if let Some(name) = lora_name {
        scratch.adapter(name);
        adapter_seen = true;
    } else if let (Some(id), true) = (lora_id, keys.is_empty()) {
        scratch.key(&ExtraKey::Int(id));
    }
    for (position, key) in keys.iter().enumerate() {
        let repeats_adapter = adapter_seen
            && match key {
                ExtraKey::Adapter(_) => true,
                ExtraKey::Text(text) => position == 0 && Some(text.as_str()) == lora_name,
                _ => false,
            };
        if !repeats_adapter {
            scratch.key(key);
        }
    }
    scratch.finish()
}

/// Hashes chains of blocks of one size under one seed.
#[derive(Clone, Copy, Debug)]
pub struct BlockHasher {
    seed: u64,
    block_size: usize,
    lookahead: usize,
}

/// Bytes in front of a block's tokens: hash of the block before, digest of the extra keys.
const HEAD_BYTES: usize = 16;

/// Bytes of a block of 16 tokens with its head: the common size on GPUs.
const SMALL_BYTES: usize = HEAD_BYTES + 4 * 16;

/// Bytes of the largest block that is laid out on the stack.
const LARGE_BYTES: usize = HEAD_BYTES + 4 * 256;

impl BlockHasher {
    /// Hashes blocks of `block_size` tokens; a size of zero is taken as one.
    pub fn new(seed: u64, block_size: u32) -> Self {
        Self { seed, block_size: (block_size as usize).max(1), lookahead: 0 }
    }

    /// Includes the `tokens` tokens after a block in its hash, as an engine with lookahead hashing does (vLLM 0.33 with a
    /// draft model). A block counts only when those tokens exist.
    #[must_use]
    pub fn with_lookahead(self, tokens: u32) -> Self {
        Self { lookahead: tokens as usize, ..self }
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Tokens after a block that its hash covers.
    pub fn lookahead(&self) -> usize {
        self.lookahead
    }

    /// What stands before the first block.
    pub fn root(&self) -> SeqHash {
        SeqHash(xxh3_64_with_seed(b"warmfront root", self.seed))
    }

    /// Hash of the block `tokens` behind `parent`.
    #[inline]
    pub fn next(&self, parent: SeqHash, extra_digest: u64, tokens: &[u32], lookahead: &[u32]) -> SeqHash {
        let length = HEAD_BYTES + 4 * (tokens.len() + lookahead.len());
        if length == SMALL_BYTES {
            // A length that the compiler knows: no call, no loop.
            self.hash(&mut [0; SMALL_BYTES], parent, extra_digest, tokens, lookahead)
        } else if length < SMALL_BYTES {
            self.hash(&mut [0; SMALL_BYTES][..length], parent, extra_digest, tokens, lookahead)
        } else if length <= LARGE_BYTES {
            self.hash(&mut [0; LARGE_BYTES][..length], parent, extra_digest, tokens, lookahead)
        } else {
            self.hash(&mut vec![0; length], parent, extra_digest, tokens, lookahead)
        }
    }

    /// Lays a block out in `buffer`, which has its length, and hashes it.
    #[expect(clippy::inline_always, reason = "only inlined does the length become a constant, which saves a quarter")]
    #[inline(always)]
    fn hash(&self, buffer: &mut [u8], parent: SeqHash, extra_digest: u64, tokens: &[u32], ahead: &[u32]) -> SeqHash {
        // Words of four bytes all the way: slice copies of a few bytes become calls.
        let (words, _) = buffer.as_chunks_mut::<4>();
        let (head, body) = words.split_at_mut(HEAD_BYTES / 4);
        for (word, number) in head.iter_mut().zip([parent.0, parent.0 >> 32, extra_digest, extra_digest >> 32]) {
            *word = (number as u32).to_le_bytes();
        }
        let (block, after) = body.split_at_mut(tokens.len());
        for (word, token) in block.iter_mut().zip(tokens) {
            *word = token.to_le_bytes();
        }
        for (word, token) in after.iter_mut().zip(ahead) {
            *word = token.to_le_bytes();
        }
        nonzero(xxh3_64_with_seed(buffer, self.seed))
    }

    /// Hashes of all full blocks of a prompt.
    pub fn chain(&self, tokens: &[u32], extras: &BlockExtras) -> Vec<SeqHash> {
        let blocks = tokens.len().saturating_sub(self.lookahead) / self.block_size;
        let plain = extras.is_empty();
        let mut scratch = ExtraDigest::default();
        let mut parent = self.root();
        let mut hashes = Vec::with_capacity(blocks);
        for block in 0..blocks {
            let (start, end) = (block * self.block_size, (block + 1) * self.block_size);
            let digest = if plain { 0 } else { extras.digest(block, start, end, &mut scratch) };
            parent = self.next(parent, digest, &tokens[start..end], &tokens[end..end + self.lookahead]);
            hashes.push(parent);
        }
        hashes
    }

    /// Hashes of all full runs of `block_bytes` bytes, for the approximate index. Never equal to hashes of tokens.
    pub fn chain_bytes(&self, bytes: &[u8], block_bytes: usize, extras: &BlockExtras) -> Vec<SeqHash> {
        let block_bytes = block_bytes.max(1);
        let mut scratch = ExtraDigest::default();
        // Token positions of media mean nothing here (0..0 overlaps none): the bytes name the items themselves.
        let first = extras.digest(0, 0, 0, &mut scratch);
        let others = extras.digest(1, 0, 0, &mut scratch);
        let mut parent = SeqHash(xxh3_64_with_seed(b"warmfront bytes", self.seed));
        let mut hashes = Vec::with_capacity(bytes.len() / block_bytes);
        let mut buffer = Vec::with_capacity(HEAD_BYTES + block_bytes);
        for (block, run) in bytes.chunks_exact(block_bytes).enumerate() {
            buffer.clear();
            buffer.extend_from_slice(&parent.0.to_le_bytes());
            buffer.extend_from_slice(&(if block == 0 { first } else { others }).to_le_bytes());
            buffer.extend_from_slice(run);
            parent = nonzero(xxh3_64_with_seed(&buffer, self.seed));
            hashes.push(parent);
        }
        hashes
    }
}

fn nonzero(hash: u64) -> SeqHash {
    SeqHash(if hash == 0 { 1 } else { hash })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hasher() -> BlockHasher {
        BlockHasher::new(7, 4)
    }

    #[test]
    fn only_full_blocks_are_hashed() {
        let tokens: Vec<u32> = (0..11).collect();
        assert_eq!(hasher().chain(&tokens, &BlockExtras::default()).len(), 2);
        assert!(hasher().chain(&tokens[..3], &BlockExtras::default()).is_empty());
    }

    #[test]
    fn a_hash_covers_everything_before_it() {
        let one = hasher().chain(&[1, 2, 3, 4, 5, 6, 7, 8], &BlockExtras::default());
        let other = hasher().chain(&[9, 2, 3, 4, 5, 6, 7, 8], &BlockExtras::default());
        assert_ne!(one[0], other[0]);
        assert_ne!(one[1], other[1]);
    }

    // bug 43
    #[test]
    fn seed_adapter_and_salt_separate_equal_tokens() {
        let tokens: Vec<u32> = (0..8).collect();
        let extras = |adapter: Option<&str>, salt: Option<&str>| BlockExtras {
            adapter: adapter.map(Into::into),
            salt: salt.map(Into::into),
            media: vec![],
        };
        let all = [
            hasher().chain(&tokens, &extras(None, None)),
            hasher().chain(&tokens, &extras(Some("a"), None)),
            hasher().chain(&tokens, &extras(None, Some("a"))),
            hasher().chain(&tokens, &extras(Some("a"), Some("a"))),
            BlockHasher::new(8, 4).chain(&tokens, &extras(None, None)),
        ];
        for (position, one) in all.iter().enumerate() {
            for other in &all[position + 1..] {
                assert!(one.iter().zip(other).all(|(left, right)| left != right));
            }
        }
    }

    #[test]
    fn event_spellings_of_extra_keys_agree_with_the_request() {
        let tokens: Vec<u32> = (0..4).collect();
        let request = BlockExtras {
            adapter: Some("adapter-a".into()),
            salt: Some("tenant".into()),
            media: vec![MediaItem { identifier: "img".into(), offset: 1, length: 2 }],
        };
        let expected = hasher().chain(&tokens, &request)[0];
        let text = |word: &str| ExtraKey::Text(word.into());
        let spellings = [
            vec![text("adapter-a"), text("img"), text("tenant")],
            vec![text("adapter-a"), ExtraKey::Item("img".into(), 1), text("tenant")],
            vec![ExtraKey::Adapter("adapter-a".into()), ExtraKey::Item("img".into(), 1), text("tenant")],
        ];
        for keys in spellings {
            let digest = event_digest(Some("adapter-a"), Some(3), &keys, &mut ExtraDigest::default());
            assert_eq!(hasher().next(hasher().root(), digest, &tokens, &[]), expected, "{keys:?}");
        }
    }

    #[test]
    fn a_salt_that_equals_the_adapter_name_is_kept() {
        let keys = [ExtraKey::Text("a".into()), ExtraKey::Text("a".into())];
        let both = event_digest(Some("a"), None, &keys, &mut ExtraDigest::default());
        let extras = BlockExtras { adapter: Some("a".into()), salt: Some("a".into()), media: vec![] };
        assert_eq!(both, extras.digest(0, 0, 4, &mut ExtraDigest::default()));
    }

    #[test]
    fn media_touch_the_blocks_they_overlap_and_no_other() {
        let tokens: Vec<u32> = vec![7; 16];
        let item = |identifier: &str| BlockExtras {
            media: vec![MediaItem { identifier: identifier.into(), offset: 4, length: 5 }],
            ..BlockExtras::default()
        };
        let (one, other) = (hasher().chain(&tokens, &item("x")), hasher().chain(&tokens, &item("y")));
        assert_eq!(one[0], other[0]);
        assert_ne!(one[1], other[1]);
        let mut scratch = ExtraDigest::default();
        assert_eq!(item("x").digest(3, 12, 16, &mut scratch), 0);
    }

    #[test]
    fn lookahead_tokens_are_part_of_the_hash() {
        let ahead = hasher().with_lookahead(1);
        let one = ahead.chain(&[1, 2, 3, 4, 5], &BlockExtras::default());
        let other = ahead.chain(&[1, 2, 3, 4, 6], &BlockExtras::default());
        assert_ne!(one, other);
        assert!(ahead.chain(&[1, 2, 3, 4], &BlockExtras::default()).is_empty());
    }

    #[test]
    fn large_blocks_hash_like_small_ones() {
        let tokens: Vec<u32> = (0..512).collect();
        let large = BlockHasher::new(7, 256);
        let chain = large.chain(&tokens, &BlockExtras::default());
        assert_eq!(chain[0], large.next(large.root(), 0, &tokens[..256], &[]));
        assert_eq!(chain.len(), 2);
    }

    #[test]
    fn byte_blocks_never_equal_token_blocks() {
        let bytes: Vec<u8> = (0..64).collect();
        let hashes = hasher().chain_bytes(&bytes, 16, &BlockExtras::default());
        assert_eq!(hashes.len(), 4);
        let salted = BlockExtras { salt: Some("s".into()), ..BlockExtras::default() };
        assert_ne!(hasher().chain_bytes(&bytes, 16, &salted)[3], hashes[3]);
    }
}
