//! Chat bodies of a given size with a shared beginning, in text that tokenizes like English.
//!
//! What one would get wrong: repeating a handful of bodies lets every router answer from a cache of whole prompts. Each
//! body here is unique from the start of its user turn on, and the turn's text comes from a pool of many.

use std::fmt::Write as _;

/// Common English words, most frequent first: picked by Zipf's law they give about 4.6 bytes a token.
const WORDS: &str = "the of and to in a is that for it as was with be by on not he his but at are this have from or had \
    an they which one you were all their there been has when who will no more if out so up said what its about than into \
    them can only other time new some could these two may first then do any like my now over such our man me even most \
    made after also did many off before must well back through years much where your way down should because long each \
    just state those people too mister how little good world make very year still see own work men day get here old life \
    both between being under three never know same last another while us might great go day come since against right came \
    take used himself few house use place during without high again home around small however found mind government \
    president general school part until always fact thought always united far put set night hand public told hands things \
    water number course company system until question church business service problem social city order example member \
    several within given information program interest development following political history community experience \
    education national economic different possible important available necessary particular international administration \
    technology understand university significant opportunity responsibility immediately environment performance \
    relationship investigation manufacturing recommendation throughput scheduling replica prefix latency memory cluster \
    customer invoice shipment warranty password network browser document summary meeting calendar language translation";
/// How many different texts the user turns are cut from.
const TAILS: usize = 64;
/// Digits of the number that makes a body unique.
const NONCE_DIGITS: usize = 12;

/// A small fast generator (`SplitMix64`), so that bodies depend on the seed alone.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Prose of exactly `bytes` bytes: sentences with commas, capitals and some numbers; ASCII, nothing JSON escapes.
pub fn prose(random: &mut Random, bytes: usize) -> String {
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let mut text = String::with_capacity(bytes + 32);
    let mut left_in_sentence = 0_u64;
    while text.len() < bytes {
        let begins = left_in_sentence == 0;
        if begins {
            left_in_sentence = 6 + random.next_u64() % 14;
        }
        if random.next_u64().is_multiple_of(40) {
            let _ = write!(text, "{}", random.next_u64() % 10_000);
        } else {
            // Zipf: the rank's logarithm is uniform.
            let rank = (random.unit() * (words.len() as f64).ln()).exp() as usize;
            push_word(&mut text, words[rank.min(words.len()) - 1], begins);
        }
        left_in_sentence -= 1;
        text.push_str(match (left_in_sentence, random.next_u64() % 12) {
            (0, _) => ". ",
            (_, 0) => ", ",
            _ => " ",
        });
    }
    text.truncate(bytes);
    text
}

fn push_word(text: &mut String, word: &str, capital: bool) {
    let mut letters = word.chars();
    match letters.next() {
        Some(first) if capital => text.extend(first.to_uppercase().chain(letters)),
        _ => text.push_str(word),
    }
}

/// Makes chat completion bodies of one size.
pub struct ChatBodies {
    head: String,
    tails: Vec<String>,
    made: u64,
    start: u64,
}

impl ChatBodies {
    /// Bodies of `bytes` bytes, whose first `shared` share is the same in all.
    pub fn new(model: &str, bytes: usize, shared: f64, max_tokens: u32, stream: bool, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let head = format!(
            r#"{{"model":"{model}","max_tokens":{max_tokens},"stream":{stream},"messages":[{{"role":"system","content":""#
        );
        let middle = r#""},{"role":"user","content":""#;
        let end = r#""}]}"#;
        let frame = head.len() + middle.len() + NONCE_DIGITS + 1 + end.len();
        let text = bytes.saturating_sub(frame);
        let system = ((bytes as f64 * shared) as usize).saturating_sub(head.len()).min(text);
        let head = head + &prose(&mut random, system) + middle;
        let tails = (0..TAILS).map(|_| prose(&mut random, text - system) + end).collect();
        Self { head, tails, made: 0, start: random.next_u64() % 10_u64.pow(NONCE_DIGITS as u32 - 1) }
    }

    /// Length of every body.
    pub fn body_bytes(&self) -> usize {
        self.head.len() + NONCE_DIGITS + 1 + self.tails[0].len()
    }

    /// Appends a body that no earlier call made.
    pub fn append(&mut self, into: &mut Vec<u8>) {
        let tail = &self.tails[self.made as usize % TAILS];
        let nonce = format!("{:0NONCE_DIGITS$} ", self.start + self.made);
        into.extend_from_slice(self.head.as_bytes());
        into.extend_from_slice(nonce.as_bytes());
        into.extend_from_slice(tail.as_bytes());
        self.made += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(bodies: &mut ChatBodies) -> String {
        let mut bytes = Vec::new();
        bodies.append(&mut bytes);
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn bodies_have_the_asked_size_and_share_their_beginning() {
        for size in [1024, 16 * 1024, 400 * 1024] {
            let mut bodies = ChatBodies::new("m", size, 0.8, 16, false, 1);
            let (first, second) = (body(&mut bodies), body(&mut bodies));
            assert_eq!((first.len(), second.len(), bodies.body_bytes()), (size, size, size));
            let same = first.bytes().zip(second.bytes()).take_while(|(a, b)| a == b).count();
            let share = same as f64 / size as f64;
            assert!((0.79..0.86).contains(&share), "{size}: {share}");
        }
    }

    #[test]
    fn bodies_are_json_and_never_repeat() {
        let mut bodies = ChatBodies::new("m", 2048, 0.8, 16, true, 7);
        let made: std::collections::HashSet<String> = (0..200).map(|_| body(&mut bodies)).collect();
        assert_eq!(made.len(), 200);
        for text in made {
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(value["messages"].as_array().unwrap().len(), 2);
        }
    }
}
