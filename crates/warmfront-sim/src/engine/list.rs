//! An order over small numbers in which any element can be taken out: the queue of free blocks, the LRU of a tier.

/// Links of the elements `1..`; element 0 is the ring's own mark and never in the order.
#[derive(Debug)]
pub(crate) struct Ring {
    links: Vec<Link>,
    length: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Link {
    before: u32,
    after: u32,
}

impl Ring {
    /// Room for the elements `1..size`, none of which is in the order.
    pub(crate) fn new(size: usize) -> Self {
        Self { links: vec![Link::default(); size.max(1)], length: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Makes room for one element more and returns it.
    pub(crate) fn grow(&mut self) -> u32 {
        self.links.push(Link::default());
        (self.links.len() - 1) as u32
    }

    pub(crate) fn first(&self) -> Option<u32> {
        (self.length > 0).then(|| self.links[0].after)
    }

    pub(crate) fn push_back(&mut self, element: u32) {
        let last = self.links[0].before;
        self.link(last, element, 0);
    }

    pub(crate) fn push_front(&mut self, element: u32) {
        let first = self.links[0].after;
        self.link(0, element, first);
    }

    /// Takes out an element that is in the order.
    pub(crate) fn remove(&mut self, element: u32) {
        let Link { before, after } = self.links[element as usize];
        self.links[before as usize].after = after;
        self.links[after as usize].before = before;
        self.length -= 1;
    }

    fn link(&mut self, before: u32, element: u32, after: u32) {
        self.links[element as usize] = Link { before, after };
        self.links[before as usize].after = element;
        self.links[after as usize].before = element;
        self.length += 1;
    }
}
