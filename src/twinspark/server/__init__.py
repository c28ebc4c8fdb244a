"""Wire formats and streams over an EngineClient. No torch, no engine."""
