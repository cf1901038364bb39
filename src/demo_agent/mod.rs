//! The bundled A2A agent for demonstrations and tests.
