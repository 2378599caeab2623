//! Time from a chat body to its token ids, step by step, on one thread.
//!
//! ```text
//! cargo run --release -p warmfront-core --example tokens_bench -- MODEL_DIRECTORY [TEMPLATE_FILE]
//! ```
//!
//! Bodies of 1 KB, 16 KB and 400 KB share their first 80 % with the bodies before them; the rest is new each time. Words
//! are drawn from a fixed list with a fixed seed. Medians and minima of all rounds, in microseconds.

use std::path::Path;
use std::time::Instant;

use bytes::Bytes;
use warmfront_core::fleet::TemplateOptions;
use warmfront_core::http::request::{Endpoint, parse};
use warmfront_core::tokenize::Tokenizer;

const ROUNDS: usize = 200;
const SHARED: f64 = 0.8;

/// A small generator of pseudo-random words; quality does not matter here.
struct Words(u64);

impl Words {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn text(&mut self, bytes: usize) -> String {
        const SYLLABLES: [&str; 16] =
            ["con", "ter", "ing", "pro", "the", "ate", "for", "an", "re", "ly", "ment", "is", "of", "tion", "al", "we"];
        let mut text = String::with_capacity(bytes + 32);
        while text.len() < bytes {
            for _ in 0..=self.next() % 3 {
                text.push_str(SYLLABLES[self.next() as usize % SYLLABLES.len()]);
            }
            text.push_str(match self.next() % 24 {
                0 => ".\n",
                1 => ", ",
                2 => ".\n\n",
                _ => " ",
            });
        }
        text
    }
}

fn body(shared: &str, own: &str) -> Bytes {
    let request = serde_json::json!({
        "model": "m", "stream": true, "max_tokens": 128,
        "messages": [{"role": "system", "content": shared}, {"role": "user", "content": own}],
    });
    Bytes::from(request.to_string())
}

fn micros(mut times: Vec<f64>) -> String {
    times.sort_by(f64::total_cmp);
    format!("{:9.1} (min {:9.1})", times[times.len() / 2], times[0])
}

fn timed<T>(times: &mut Vec<f64>, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    times.push(start.elapsed().as_secs_f64() * 1e6);
    result
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: tokens_bench MODEL_DIRECTORY [TEMPLATE_FILE]")?;
    let default = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}".to_owned();
    let options =
        TemplateOptions { chat_template: Some(arguments.next().unwrap_or(default)), ..TemplateOptions::default() };
    let start = Instant::now();
    let tokenizer = Tokenizer::load(Path::new(&path), &options)?;
    println!("loaded in {:.1} s, fast: {}", start.elapsed().as_secs_f64(), tokenizer.is_fast());
    let mut words = Words(7);
    for bytes in [1_000, 16_000, 400_000] {
        let shared = words.text((f64::from(bytes) * SHARED) as usize);
        let (mut parsing, mut rendering, mut all, mut whole) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let body = body(&shared, &words.text((f64::from(bytes) * (1.0 - SHARED)) as usize));
            let parsed = timed(&mut parsing, || parse(Endpoint::Chat, &body))?;
            let text = timed(&mut rendering, || tokenizer.render(Endpoint::Chat, &parsed)).map_err(|_| "fallback")?;
            timed(&mut all, || parse(Endpoint::Chat, &body).map(|body| tokenizer.prompt(Endpoint::Chat, &body)))?
                .map_err(|_| "fallback")?;
            if round % 20 == 0 {
                timed(&mut whole, || tokenizer.encode_whole(&text)).map_err(|_| "fallback")?;
            }
        }
        println!("{bytes:7} bytes  parse           {}", micros(parsing));
        println!("               render          {}", micros(rendering));
        println!("               body to tokens  {}", micros(all));
        println!("               encode in one   {}", micros(whole));
    }
    println!("{:?}", tokenizer.cache_stats());
    Ok(())
}
