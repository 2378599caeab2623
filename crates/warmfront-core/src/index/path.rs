//! The nodes of one prompt, from its first block on.
//!
//! Nodes of a chain mostly have consecutive numbers, so a path is kept as runs: a prompt of thousands of blocks takes a few
//! words.

use std::sync::Arc;

use super::arena::Node;

/// Consecutive nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: Node,
    /// Blocks of the path before this run.
    depth: u32,
}

#[derive(Clone, Debug)]
pub(super) struct Path {
    runs: Arc<[Run]>,
    blocks: u32,
}

impl Path {
    pub(super) fn new(nodes: &[Node]) -> Self {
        let mut runs: Vec<Run> = Vec::new();
        let mut expected = Node::MAX;
        for (depth, node) in nodes.iter().enumerate() {
            if *node != expected {
                runs.push(Run { first: *node, depth: depth as u32 });
            }
            expected = node + 1;
        }
        Self { runs: runs.into(), blocks: nodes.len() as u32 }
    }

    pub(super) fn len(&self) -> u32 {
        self.blocks
    }

    /// The node at `depth`, which is below the length.
    pub(super) fn node(&self, depth: u32) -> Node {
        let run = self.runs[self.runs.partition_point(|run| run.depth <= depth) - 1];
        run.first + (depth - run.depth)
    }

    /// The nodes of the first `blocks` blocks, the last one first.
    pub(super) fn backwards(&self, blocks: u32) -> impl Iterator<Item = Node> {
        let mut end = blocks;
        self.runs.iter().rev().filter(move |run| run.depth < blocks).flat_map(move |run| {
            let length = end - run.depth;
            end = run.depth;
            (run.first..run.first + length).rev()
        })
    }

    /// First node and length of each run of the first `blocks` blocks.
    pub(super) fn runs(&self, blocks: u32) -> impl Iterator<Item = (Node, u32)> {
        let ends = self.runs.iter().skip(1).map(|run| run.depth).chain([self.blocks]);
        let inside = self.runs.iter().zip(ends).filter(move |(run, _)| run.depth < blocks);
        inside.map(move |(run, end)| (run.first, end.min(blocks) - run.depth))
    }

    pub(super) fn bytes(&self) -> usize {
        // Two counts precede the runs.
        self.runs.len() * size_of::<Run>() + 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_gives_back_its_nodes() {
        let nodes = [7, 8, 9, 3, 20, 21, 4];
        let path = Path::new(&nodes);
        assert_eq!((path.len(), path.runs.len()), (7, 4));
        for blocks in 0..=7 {
            let expected: Vec<Node> = nodes[..blocks].iter().rev().copied().collect();
            assert_eq!(path.backwards(blocks as u32).collect::<Vec<_>>(), expected);
        }
        assert!((0..7).all(|depth| path.node(depth as u32) == nodes[depth]));
    }
}
