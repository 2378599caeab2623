//! Prompts as segments: content without token ids.
//!
//! A segment is the first tokens of some content. The same content always has the same tokens, so prompts are equal as far as
//! their segments are, and their block hashes are equal exactly as far as their tokens are: tokens are made here and hashed by
//! the core's own hasher.

use std::ops::Range;

use warmfront_core::block::{BlockExtras, BlockHasher, SeqHash};

/// The first `tokens` tokens of content `content`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub content: u64,
    pub tokens: u32,
}

/// Mixed into the number of a request to name an answer that no prompt contains.
const ANSWER: u64 = 0xa5a5_1234_9e37_79b9;
const STRIDE: u32 = 0x9e37_79b1;

/// Content of an answer that is unlike any other.
pub fn own_answer(request: u64) -> u64 {
    spread(request ^ ANSWER)
}

/// Writes the tokens of `range` to the end of `tokens`.
///
/// Two neighbouring tokens carry 64 bits of the content's name, so different contents never look alike for a whole block.
pub fn write(segments: &[Segment], range: Range<usize>, tokens: &mut Vec<u32>) {
    let mut start = 0;
    for segment in segments {
        let end = start + segment.tokens as usize;
        let name = spread(segment.content);
        let words = [name as u32, (name >> 32) as u32];
        let (first, last) = (range.start.max(start), range.end.min(end));
        tokens.extend((first..last).map(|position| {
            let offset = (position - start) as u32;
            words[(offset & 1) as usize] ^ offset.wrapping_mul(STRIDE)
        }));
        start = end;
    }
}

/// Hashes of the full blocks of a prompt and what follows it.
pub fn chain(
    segments: &[Segment],
    adapter: Option<&str>,
    hasher: &BlockHasher,
    scratch: &mut Vec<u32>,
) -> Vec<SeqHash> {
    scratch.clear();
    write(segments, 0..length(segments), scratch);
    let extras = BlockExtras { adapter: adapter.map(Into::into), ..BlockExtras::default() };
    hasher.chain(scratch, &extras)
}

/// Tokens of all segments.
pub fn length(segments: &[Segment]) -> usize {
    segments.iter().map(|segment| segment.tokens as usize).sum()
}

fn spread(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(segments: &[(u64, u32)], adapter: Option<&str>) -> Vec<SeqHash> {
        let segments: Vec<_> = segments.iter().map(|&(content, tokens)| Segment { content, tokens }).collect();
        chain(&segments, adapter, &BlockHasher::new(0, 8), &mut Vec::new())
    }

    #[test]
    fn hashes_are_equal_exactly_as_far_as_the_content_is() {
        let (one, other) = (hashes(&[(1, 20), (2, 20)], None), hashes(&[(1, 20), (3, 20)], None));
        assert_eq!(one[..2], other[..2]);
        assert!(one[2..].iter().zip(&other[2..]).all(|(left, right)| left != right));
        assert_eq!(hashes(&[(1, 16)], None), one[..2], "content cut to a length begins alike");
        assert_ne!(hashes(&[(1, 8), (1, 8)], None)[1], one[1]);
    }

    #[test]
    fn an_adapter_has_hashes_of_its_own() {
        let (plain, adapted) = (hashes(&[(1, 16)], None), hashes(&[(1, 16)], Some("north")));
        assert!(plain.iter().zip(&adapted).all(|(left, right)| left != right));
    }

    #[test]
    fn a_part_of_a_prompt_has_the_tokens_of_the_whole() {
        let segments = [Segment { content: 5, tokens: 7 }, Segment { content: 6, tokens: 9 }];
        let (mut whole, mut part) = (Vec::new(), Vec::new());
        write(&segments, 0..16, &mut whole);
        write(&segments, 4..12, &mut part);
        assert_eq!(whole[4..12], part);
    }
}
